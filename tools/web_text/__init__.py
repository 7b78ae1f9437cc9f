"""Web text: from lists of URLs to clean, deduplicated documents, one step at a time.

    recipe.yml, or a command line        recipe.py, command.py     settings of each step, checked
        |
        v
    run_step                             run.py                    inputs hashed, output locked, an equal run kept
        |  Step.run(Job)
        |     documents one by one       documents.py              chunks of the inputs (chunks.py) to worker processes
        |     pages one by one           pages.py -> documents.py  the same, from WARC or HTML files
        |     whole files                lines.py                  read in order, written as lines
        v
    OUTPUT, dropped/OUTPUT, OUTPUT.step.json

With `--executor` tasks on other machines compute shares of the chunks first (executor.py, `write_shard`).

README.md says which file belongs to which step.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tools.web_text.clean import CLEAN
from tools.web_text.decontaminate import DECONTAMINATE
from tools.web_text.dedup import DEDUP
from tools.web_text.download import DOWNLOAD
from tools.web_text.extract import EXTRACT
from tools.web_text.filter_urls import FILTER_URLS
from tools.web_text.recipe import RecipeStep, read_recipe
from tools.web_text.run import describe_report, run_step
from tools.web_text.shuffle import SHUFFLE
from tools.web_text.split import SPLIT
from tools.web_text.step import Settings, Step
from tools.web_text.tokenize import TOKENIZE
from tools.web_text.wikipedia import WIKIPEDIA

__all__ = ["STEPS", "RecipeStep", "Settings", "Step", "describe_report", "read_recipe", "run_step"]

_IN_ORDER: tuple[Step[Any], ...] = (
    FILTER_URLS,
    DOWNLOAD,
    EXTRACT,
    WIKIPEDIA,
    CLEAN,
    DEDUP,
    DECONTAMINATE,
    SHUFFLE,
    SPLIT,
    TOKENIZE,
)

STEPS: Mapping[str, Step[Any]] = MappingProxyType({step.name: step for step in _IN_ORDER})
"""Name -> step, in the order of the recipe."""
