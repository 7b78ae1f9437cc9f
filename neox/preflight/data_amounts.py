"""Amounts of training data, which the plan compares with what a run reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from neox.config import NeoXConfig
from neox.config.sections.data import split_shares
from neox.errors import ConfigError, DataError
from neox.plan import RunPlan
from neox.plan.data_lines import notes_on_passes
from neox.problems import Problem

if TYPE_CHECKING:
    import numpy as np

_PACKED_DOCUMENTS = 1 << 17
"""Documents that are packed to say what packing wastes: a fraction of a second."""


def with_amounts(plan: RunPlan) -> tuple[RunPlan, tuple[Problem, ...]]:
    """Return a plan with the sizes of its datasets and notes on them, and why they do not suffice."""
    data = plan.config.data
    if data.weight_by_num_documents or plan.config.training.train_iters is None:
        return plan, ()
    plan = replace(plan, dataset_tokens=training_tokens(plan.config), pass_tokens=tokens_of_passes(plan.config))
    plan = replace(plan, notes=(*plan.notes, *_packing_notes(plan.config)))
    try:
        return replace(plan, notes=(*plan.notes, *notes_on_passes(plan))), ()
    except ConfigError as error:
        return replace(plan, dataset_tokens=(), pass_tokens=()), error.problems


def training_tokens(config: NeoXConfig) -> tuple[int, ...]:
    """Return the number of tokens of each training dataset; none if one cannot be read.

    `data_problems` says why it cannot. With `data_path` it is the part for training.
    """
    data = config.data
    try:
        if data.train_data_paths is not None:
            return tuple(map(_tokens, data.train_data_paths))
        if data.data_path is not None:
            return (round(_tokens(data.data_path) * split_shares(data.split)[0]),)
    except (ConfigError, DataError, ModuleNotFoundError):
        return ()
    return ()


def tokens_of_passes(config: NeoXConfig) -> tuple[int, ...]:
    """Return the tokens of one pass over each training dataset, including padding; empty if samples have no padding."""
    data = config.data
    length = config.model.seq_length
    if data.pack_impl == "packed" or length is None or config.preferences.on_preferences:
        return ()
    prefixes = data.train_data_paths or (data.data_path,)
    share = split_shares(data.split)[0] if data.train_data_paths is None else 1.0
    try:
        from neox.data.indexed_dataset import IndexedDataset  # numpy, which a dry run without data does not need
        from neox.data.packing import tokens_of_pass

        return tuple(round(share * tokens_of_pass(IndexedDataset(str(p)).sizes, data, length)) for p in prefixes)
    except (ConfigError, DataError, ModuleNotFoundError):  # `data_problems` says why
        return ()


def _packing_notes(config: NeoXConfig) -> Iterator[str]:
    """Yield the shares of padding and of cut documents in each training dataset that `best_fit` packs."""
    data = config.data
    if data.pack_impl != "best_fit" or config.model.seq_length is None:
        return
    prefixes = data.train_data_paths or (data.data_path,)
    for prefix in prefixes:
        try:
            sizes, documents = _first_sizes(str(prefix))
        except (ConfigError, DataError, ModuleNotFoundError):  # `data_problems` says why
            continue
        from neox.data.best_fit import packing_shares  # numpy, which a dry run without data does not need

        shares = packing_shares(sizes, config.model.seq_length)
        sampled = f", by its first {len(sizes):,} documents" if len(sizes) < documents else ""
        yield (
            f"{prefix}: `pack_impl: best_fit` makes {shares.padding:.1%} of all positions padding and cuts "
            f"{shares.cut:.1%} of the documents{sampled}"
        )


def _first_sizes(prefix: str) -> tuple[np.ndarray, int]:
    """Return the numbers of tokens of a dataset's first documents, and its number of documents."""
    from neox.data.indexed_dataset import IndexedDataset

    indexed = IndexedDataset(prefix)
    return indexed.sizes[:_PACKED_DOCUMENTS], len(indexed)


def _tokens(prefix: str) -> int:
    """Return the number of tokens of a dataset, from its sidecar or, if it has none, its index."""
    from neox.data.indexed_dataset import IndexedDataset  # numpy, which a dry run without data does not need
    from neox.data.sidecar import read_sidecar

    sidecar = read_sidecar(prefix)
    if sidecar is not None:
        return sidecar.tokens
    return IndexedDataset(prefix).num_tokens
