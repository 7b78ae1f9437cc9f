"""Hugging Face architectures as data: configuration, tensor names and layouts, and their limits. No torch.

A family is a file of this package that holds a `Family`. `neox.convert` reads and writes its models.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from neox.families.entries import ModelSettings
from neox.families.family import Family, TensorMapping, TensorSource

_FIRST = ("gpt_neox", "gpt2", "gptj", "llama", "mistral", "qwen2", "qwen3", "olmo2")
"""Families that come first if several can express a network, because most programs read them."""


def _find_families() -> dict[str, Family]:
    """Return every `Family` in the files of this package by its `model_type`: `_FIRST`, then by their names."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        for value in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if isinstance(value, Family):
                found[value.model_type] = value
    names = [*_FIRST, *sorted(found.keys() - {*_FIRST})]
    return {name: found[name] for name in names}


FAMILIES: Mapping[str, Family] = MappingProxyType(_find_families())
"""`model_type` of `config.json` -> family, in order of preference."""

__all__ = ["FAMILIES", "Family", "ModelSettings", "TensorMapping", "TensorSource"]
