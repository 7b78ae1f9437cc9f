"""Pretraining and finetuning of one rank: from the plan to the exit code."""

from __future__ import annotations

from neox.data.run_data import DataIterators, build_data_iterators
from neox.engine import agree_on_start, initialize_distributed, open_engine, shutdown
from neox.features.table import build_reporters, features_with
from neox.log import setup_logging
from neox.plan import RunPlan
from neox.train.failures import reported_failures
from neox.train.stopping import ignore_signals
from neox.train.trainer import Trainer


def pretrain(plan: RunPlan) -> int:
    """Train or finetune as planned, on this rank; all ranks call it together.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        NeoXError: If something fails that users can mend.
    """
    with reported_failures():
        return _pretrain(plan)


def _pretrain(plan: RunPlan) -> int:
    """Train on this rank, and return the exit code."""
    grid, device = initialize_distributed(plan)
    setup_logging(grid.rank)
    plan, start = agree_on_start(plan)
    reporters = build_reporters(plan, grid.rank)
    engine = open_engine(plan, grid, device, features_with(reporters), start)

    def open_data() -> DataIterators:
        return build_data_iterators(plan, grid.data_rank, engine.iteration, **engine.data_arguments())

    code = Trainer(plan, engine, open_data(), open_data).fit()
    if code:
        # torchrun signals the other ranks when the first one exits with such a status; they have finished as well.
        ignore_signals()
    shutdown()
    for feature in engine.features:
        feature.on_exit()
    return code
