"""Web text: from lists of URLs to clean, deduplicated documents, one step at a time."""

from tools.web_text.recipe import RecipeStep, read_recipe
from tools.web_text.run import describe_report, run_step
from tools.web_text.step import Settings, Step
from tools.web_text.steps import STEPS

__all__ = ["STEPS", "RecipeStep", "Settings", "Step", "describe_report", "read_recipe", "run_step"]
