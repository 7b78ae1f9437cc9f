"""Saving: weights as layer files, the rest as DeepSpeed writes it, made final by one commit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from neox.checkpoint import (
    ORDER,
    FileRecord,
    commit,
    discard,
    identity_state,
    keep_last,
    record_share,
    stage_directory,
    staging_path,
    write_config,
)
from neox.config import RunPlan
from neox.engine.agreement import all_succeeded, from_first_rank
from neox.engine.any_degrees import optimizer_order
from neox.engine.engine import Engine
from neox.engine.file_writer import FileWriter
from neox.engine.forward_check import FILE as LOGITS
from neox.engine.forward_check import fixed_logits
from neox.engine.weights import write_weights
from neox.errors import CheckpointError
from neox.parallel import ParallelGrid


def save_checkpoint(engine: Engine, save: str | Path, client_state: Mapping[str, Any] | None = None) -> Path:
    """Write a checkpoint of the engine's iteration under `save` and return its path; all ranks call it together.

    Raises CheckpointError on every rank when any rank could not write; earlier checkpoints are then untouched.
    """
    writer = FileWriter(not engine.plan.config.checkpoint.no_save_optim)
    staged = stage_files(engine, save, writer, client_state)
    return commit_files(engine.plan, engine.grid, writer, staged)


def stage_files(
    engine: Engine, save: str | Path, writer: FileWriter, client_state: Mapping[str, Any] | None = None
) -> Path:
    """Give `writer` everything that a checkpoint of the engine's iteration holds; return the staging directory.

    Raises CheckpointError on every rank when any rank could not write.
    """
    plan, grid, body = engine.plan, engine.grid, engine.body
    staged = staging_path(save, engine.iteration)
    from_first_rank(lambda: stage_directory(save, engine.iteration))
    body.checkpoint_engine = writer
    state = {
        **neox_client_state(plan, grid, engine.iteration),
        ORDER: optimizer_order(body.module),
        **(client_state or {}),
    }
    checked = plan.config.checkpoint.checkpoint_validation_with_forward_pass
    logits = fixed_logits(engine) if checked else None

    def write() -> None:
        problem: CheckpointError | None = None
        try:
            write_weights(body.module, plan.layers, grid, partial(writer.put_layer, staged, tp_rank=grid.tp_rank))
            if grid.rank == 0:
                write_config(staged, plan.config.to_flat())
        except CheckpointError as error:
            problem = error
        if logits is not None and grid.dp_rank == 0 and grid.tp_rank == 0:
            writer.put(staged / LOGITS, {"logits": logits, "precision": plan.precision})
        body.save_checkpoint(str(staged.parent), tag=staged.name, client_state=state, save_latest=False)
        if problem or writer.failure:
            raise problem or writer.failure  # type: ignore[misc]

    with _discarded_on_failure(staged, grid):
        all_succeeded(write, f"saving iteration {engine.iteration}")
    return staged


def commit_files(
    plan: RunPlan, grid: ParallelGrid, writer: FileWriter, staged: Path, group: dist.ProcessGroup | None = None
) -> Path:
    """Write what `writer` still holds, hash it, and make it the newest checkpoint; return its path.

    group: of all ranks, when this does not run in training's thread. Raises CheckpointError on every rank.
    """
    with _discarded_on_failure(staged, grid):
        if writer.later:
            all_succeeded(writer.write_queued, f"saving {staged}", group)
        records = _record_together(staged, grid, group)
    final = from_first_rank(lambda: commit(staged, records), group)
    keep = plan.config.checkpoint.keep_last_n_checkpoints
    if keep is not None:
        from_first_rank(lambda: keep_last(staged.parent, keep), group)
    return final


@contextmanager
def _discarded_on_failure(staged: Path, grid: ParallelGrid) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        if grid.rank == 0:
            discard(staged)
        raise


def _record_together(staged: Path, grid: ParallelGrid, group: dist.ProcessGroup | None) -> dict[str, FileRecord]:
    """Hash the staged files, each rank a share of them; the records of all files on every rank."""
    share: dict[str, FileRecord] = {}
    all_succeeded(lambda: share.update(record_share(staged, grid.rank, grid.world_size)), f"hashing {staged}", group)
    shares: list[dict[str, FileRecord]] = [{} for _ in range(grid.world_size)]
    dist.all_gather_object(shares, share, group=group)
    return {name: record for part in shares for name, record in part.items()}


def layout_of(plan: RunPlan) -> dict[str, Any]:
    """What decides the form of DeepSpeed's files; the optimizer's state fits this layout alone."""
    return {
        "pp": plan.grid.pp_size,
        "mp": plan.grid.tp_size,
        "dp": plan.grid.dp_size,
        "zero_stage": plan.config.deepspeed.zero_optimization.stage,
        "precision": plan.precision,
        "stages": [stage.first for stage in plan.stages],
    }


def neox_client_state(plan: RunPlan, grid: ParallelGrid, iteration: int) -> dict[str, Any]:
    """What gpt-neox keeps beside the weights, under its names, and the layout."""
    state: dict[str, Any] = {
        "iteration": iteration,
        "layout": layout_of(plan),
        **identity_state(plan),
    }
    if not plan.config.checkpoint.no_save_rng:
        state |= _random_states(grid)
    return state


def _random_states(grid: ParallelGrid) -> dict[str, Any]:
    """Random states under gpt-neox's names, which asks for them; our own runs seed every step from its number."""
    kind, keys, *rest = np.random.get_state()
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state(),
        "rng_tracker_states": grid.rng.get_states()["states"],
    }
