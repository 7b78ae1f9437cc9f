"""Tokens to batches. Names are loaded when first used, so that writing a dataset does not wait for torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neox.data.batches import Batch, BatchIterator
    from neox.data.builder import BuilderState, IndexedDatasetBuilder, merge_datasets
    from neox.data.gpt_dataset import GPTDataset
    from neox.data.index_format import best_dtype
    from neox.data.indexed_dataset import IndexedDataset

_HOMES = {
    "Batch": "batches",
    "BatchIterator": "batches",
    "BuilderState": "builder",
    "IndexedDatasetBuilder": "builder",
    "merge_datasets": "builder",
    "GPTDataset": "gpt_dataset",
    "best_dtype": "index_format",
    "IndexedDataset": "indexed_dataset",
}

__all__ = [
    "Batch",
    "BatchIterator",
    "BuilderState",
    "GPTDataset",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "best_dtype",
    "merge_datasets",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
