"""Token datasets: files, samples and blends. `batches` and `build` turn them into batches (they import torch)."""

from neox.data.mixtures.blend import BlendedDataset
from neox.data.samples.gpt_dataset import GPTDataset
from neox.data.token_files.builder import BuilderState, IndexedDatasetBuilder, merge_datasets
from neox.data.token_files.indexed_dataset import IndexedDataset, best_dtype
from neox.data.token_files.sidecar import Sidecar, check_fits, read_sidecar, write_sidecar

__all__ = [
    "BlendedDataset",
    "BuilderState",
    "GPTDataset",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "Sidecar",
    "best_dtype",
    "check_fits",
    "merge_datasets",
    "read_sidecar",
    "write_sidecar",
]
