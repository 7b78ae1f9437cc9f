"""Table of the steps, in the order of the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from neox.webtext.clean import CLEAN
from neox.webtext.decontaminate import DECONTAMINATE
from neox.webtext.dedup import DEDUP
from neox.webtext.download import DOWNLOAD
from neox.webtext.extract import EXTRACT
from neox.webtext.filter_urls import FILTER_URLS
from neox.webtext.shuffle import SHUFFLE
from neox.webtext.split import SPLIT
from neox.webtext.step import Step
from neox.webtext.tokenize import TOKENIZE
from neox.webtext.wikipedia import WIKIPEDIA

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
