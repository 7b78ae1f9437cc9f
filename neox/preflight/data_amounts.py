"""Amounts of training data, which the plan compares with what a run reads."""

from __future__ import annotations

from dataclasses import replace

from neox.config import NeoXConfig
from neox.config.sections.data import split_shares
from neox.errors import ConfigError, DataError
from neox.plan import RunPlan
from neox.plan.data_lines import notes_on_passes
from neox.problems import Problem


def with_amounts(plan: RunPlan) -> tuple[RunPlan, tuple[Problem, ...]]:
    """Return a plan with the sizes of its datasets and notes on them, and why they do not suffice."""
    data = plan.config.data
    if data.weight_by_num_documents or plan.config.training.train_iters is None:
        return plan, ()
    plan = replace(plan, dataset_tokens=training_tokens(plan.config))
    try:
        return replace(plan, notes=(*plan.notes, *notes_on_passes(plan))), ()
    except ConfigError as error:
        return replace(plan, dataset_tokens=()), error.problems


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


def _tokens(prefix: str) -> int:
    """Return the number of tokens of a dataset, from its sidecar or, if it has none, its index."""
    from neox.data.indexed_dataset import IndexedDataset  # numpy, which a dry run without data does not need
    from neox.data.sidecar import read_sidecar

    sidecar = read_sidecar(prefix)
    if sidecar is not None:
        return sidecar.tokens
    return IndexedDataset(prefix).num_tokens
