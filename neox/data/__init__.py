"""Tokens to batches. Names are loaded when first used, so that writing a dataset does not wait for torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neox.data.batches import Batch, BatchIterator
    from neox.data.blend import BlendedDataset
    from neox.data.build import DataIterators, Datasets, build_data_iterators, build_datasets, sample_counts
    from neox.data.builder import BuilderState, IndexedDatasetBuilder
    from neox.data.gpt_dataset import GPTDataset
    from neox.data.index_format import best_dtype
    from neox.data.indexed_dataset import IndexedDataset
    from neox.data.merging import merge_datasets
    from neox.data.sidecar import Sidecar, check_fits, read_sidecar, write_sidecar

_HOMES = {
    "Batch": "batches",
    "BatchIterator": "batches",
    "BlendedDataset": "blend",
    "DataIterators": "build",
    "Datasets": "build",
    "build_data_iterators": "build",
    "build_datasets": "build",
    "sample_counts": "build",
    "BuilderState": "builder",
    "IndexedDatasetBuilder": "builder",
    "merge_datasets": "merging",
    "GPTDataset": "gpt_dataset",
    "best_dtype": "index_format",
    "IndexedDataset": "indexed_dataset",
    "Sidecar": "sidecar",
    "check_fits": "sidecar",
    "read_sidecar": "sidecar",
    "write_sidecar": "sidecar",
}

__all__ = [
    "Batch",
    "BatchIterator",
    "BlendedDataset",
    "BuilderState",
    "DataIterators",
    "Datasets",
    "GPTDataset",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "Sidecar",
    "best_dtype",
    "build_data_iterators",
    "build_datasets",
    "check_fits",
    "merge_datasets",
    "read_sidecar",
    "sample_counts",
    "write_sidecar",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
