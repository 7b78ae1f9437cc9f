"""Hugging Face architectures as data: configuration, tensor names and layouts, and their limits. No torch.

A family is a file of this package that holds a `Family`. `neox.convert` reads and writes its models.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType

from neox.families.config_entries import ModelSettings
from neox.families.family import Family, TensorMapping, TensorSource

_FIRST: Mapping[str, str] = MappingProxyType(
    {
        "gpt_neox": "gpt_neox",
        "gpt2": "gpt2",
        "gptj": "gptj",
        "llama": "llama",
        "mistral": "mistral",
        "qwen2": "qwen",
        "qwen3": "qwen",
        "olmo2": "olmo2",
    }
)
"""`model_type` -> file of the families that come first if several can express a network: most programs read them."""


class _FoundFamilies(Mapping[str, Family]):
    """Every `Family` in the files of this package by `model_type`: those of `_FIRST`, then the others by name.

    A file is read when its family is asked for. A plan asks whether any family can express its network, and for most
    networks the first one can.
    """

    def __iter__(self) -> Iterator[str]:
        yield from _FIRST
        yield from sorted(_all_families().keys() - _FIRST.keys())

    def __getitem__(self, model_type: str) -> Family:
        if model_type in _FIRST:
            return _families_of(_FIRST[model_type])[model_type]
        return _all_families()[model_type]

    def __len__(self) -> int:
        return len(_all_families())


def _families_of(file: str) -> dict[str, Family]:
    """Return the families that are names of a file of this package, by `model_type`."""
    values = vars(importlib.import_module(f"{__name__}.{file}")).values()
    return {value.model_type: value for value in values if isinstance(value, Family)}


@cache
def _all_families() -> Mapping[str, Family]:
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        found |= _families_of(module.name)
    return MappingProxyType(found)


FAMILIES: Mapping[str, Family] = _FoundFamilies()
"""`model_type` of `config.json` -> family, in order of preference."""

__all__ = ["FAMILIES", "Family", "ModelSettings", "TensorMapping", "TensorSource"]
