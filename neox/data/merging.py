"""Datasets joined into one, with what they know about themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from neox.data.builder import IndexedDatasetBuilder
from neox.data.indexed_dataset import IndexedDataset
from neox.data.sidecar import joined_sidecar, read_sidecar, write_sidecar
from neox.errors import DataError
from neox.log import get_logger

_LOG = get_logger(__name__)


def merge_datasets(prefixes: Sequence[str | Path], output: str | Path) -> None:
    """Join datasets of one layout, dtype and tokenizer, in order, into `output`: the bytes of one run over all inputs.

    The output has a sidecar where every input has one. Raises DataError for datasets that do not go together.
    """
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    if not parts:
        raise DataError("nothing to merge: give at least one prefix")
    if str(output) in {part.prefix for part in parts}:
        raise DataError(f"{output} is both an input and the output of the merge; write to another prefix")
    if len({(part.layout, part.dtype) for part in parts}) > 1:
        listed = "; ".join(f"{part.prefix}: {part.layout} {part.dtype}" for part in parts)
        raise DataError(f"datasets of different kinds cannot be merged ({listed}); preprocess them alike")
    sidecars = [read_sidecar(prefix) for prefix in prefixes]
    known = [sidecar for sidecar in sidecars if sidecar is not None]
    joined = joined_sidecar(known) if known else None  # before anything is written: tokenizers may differ
    with IndexedDatasetBuilder(output, parts[0].dtype, impl=parts[0].layout) as builder:
        for prefix in prefixes:
            builder.merge(prefix)
    if joined is not None and len(known) == len(sidecars):
        write_sidecar(output, replace(joined, crc32=builder.crc32))
    elif known:
        _LOG.warning("not every input has a .json that names its tokenizer, so %s has none", output)
