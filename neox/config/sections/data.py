"""Training data: token files, splits and blends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from neox.config.sections.base import OnlyWith, Section


class DataConfig(Section):
    """Where tokens come from and in what proportion."""

    data_path: str | None = None
    """Prefix of one `.bin/.idx` pair, divided by `split`."""

    train_data_paths: tuple[str, ...] | None = None
    """Prefixes blended for training, instead of data_path."""

    valid_data_paths: Annotated[tuple[str, ...] | None, OnlyWith("train_data_paths")] = None
    """Prefixes blended for validation."""

    test_data_paths: Annotated[tuple[str, ...] | None, OnlyWith("train_data_paths")] = None
    """Prefixes blended for the test at the end."""

    train_data_weights: Annotated[tuple[float, ...] | None, OnlyWith("train_data_paths")] = None
    """Weight of each training prefix; equal where unset."""

    valid_data_weights: Annotated[tuple[float, ...] | None, OnlyWith("train_data_paths")] = None
    """Weight of each validation prefix."""

    test_data_weights: Annotated[tuple[float, ...] | None, OnlyWith("train_data_paths")] = None
    """Weight of each test prefix."""

    weight_by_num_documents: Annotated[bool, OnlyWith("train_data_paths")] = False
    """Weigh prefixes by documents, in place of *_data_weights: with share p of the documents, p ** alpha * (1 - p)."""

    weighted_sampler_alpha: Annotated[float, OnlyWith("weight_by_num_documents")] = Field(0.3, ge=0)
    """alpha of weight_by_num_documents; the smaller, the more small sets are lifted."""

    data_impl: Literal["infer", "mmap", "cached", "lazy"] = "infer"
    """Format of the token files; `infer` reads it from the `.idx`."""

    mmap_warmup: bool = False
    """Read token files once before training, so that they are in the page cache."""

    split: Annotated[str, OnlyWith("train_data_paths", (None,))] = "969, 30, 1"
    """Train, validation and test parts of data_path."""

    num_workers: int = Field(2, ge=0)
    """Threads that read batches ahead (gpt-neox: processes), each up to two; 0 reads a batch when it is asked for."""

    eod_mask_loss: bool = False
    """Leave end-of-document tokens out of the loss."""

    reset_attention_mask: bool = False
    """Attention and positions begin again after each end of a document: no token sees another document's. Without
    pipeline stages, and not with the fused softmax."""
