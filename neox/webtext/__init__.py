"""Web text: from lists of URLs to clean, deduplicated documents, one step at a time."""

from neox.webtext.recipe import RecipeStep, read_recipe
from neox.webtext.run import describe_report, run_step
from neox.webtext.step import Settings, Step
from neox.webtext.steps import STEPS

__all__ = ["STEPS", "RecipeStep", "Settings", "Step", "describe_report", "read_recipe", "run_step"]
