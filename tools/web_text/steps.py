"""Table of the steps, in the order of the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tools.web_text.clean import CLEAN
from tools.web_text.decontaminate import DECONTAMINATE
from tools.web_text.dedup import DEDUP
from tools.web_text.download import DOWNLOAD
from tools.web_text.extract import EXTRACT
from tools.web_text.filter_urls import FILTER_URLS
from tools.web_text.shuffle import SHUFFLE
from tools.web_text.split import SPLIT
from tools.web_text.step import Step
from tools.web_text.tokenize import TOKENIZE
from tools.web_text.wikipedia import WIKIPEDIA

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
