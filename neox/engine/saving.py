"""Saving: weights as layer files, the rest as DeepSpeed writes it, made final by one commit."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from neox.checkpoint import (
    ORDER,
    FileRecord,
    commit,
    discard,
    identity_state,
    keep_last,
    load_file,
    record_share,
    save_file,
    stage_directory,
    staging_path,
    write_config,
)
from neox.config import RunPlan
from neox.engine.agreement import all_succeeded, from_first_rank
from neox.engine.any_degrees import optimizer_order
from neox.engine.engine import Engine
from neox.engine.weights import write_weights
from neox.errors import CheckpointError
from neox.parallel import ParallelGrid


class FileWriter(CheckpointEngine):
    """Where DeepSpeed's own files go: a failure is kept for later, because it raises between collectives otherwise.

    with_optimizer: False leaves the optimizer's state out.
    """

    def __init__(self, with_optimizer: bool) -> None:
        self.name = "layer-files"
        self.with_optimizer = with_optimizer
        self.failure: CheckpointError | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        self.failure = None

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        if not self.with_optimizer:
            if path.endswith("optim_states.pt"):
                return
            state_dict = {**state_dict, "optimizer": None}
        try:
            save_file(Path(path), state_dict)
        except CheckpointError as error:
            self.failure = error

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_file(Path(path))

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


def save_checkpoint(engine: Engine, save: str | Path, client_state: Mapping[str, Any] | None = None) -> Path:
    """Write a checkpoint of the engine's iteration under `save` and return its path; all ranks call it together.

    Raises CheckpointError on every rank when any rank could not write; earlier checkpoints are then untouched.
    """
    plan, grid = engine.plan, engine.grid
    staged = staging_path(save, engine.iteration)
    from_first_rank(lambda: stage_directory(save, engine.iteration))
    writer = FileWriter(with_optimizer=not plan.config.checkpoint.no_save_optim)
    engine.body.checkpoint_engine = writer
    state = {
        **neox_client_state(plan, grid, engine.iteration),
        ORDER: optimizer_order(engine.body.module),
        **(client_state or {}),
    }

    def write() -> None:
        problem: CheckpointError | None = None
        try:
            write_weights(engine.body.module, plan.layers, grid, staged)
            if grid.rank == 0:
                write_config(staged, plan.config.to_flat())
        except CheckpointError as error:
            problem = error
        engine.body.save_checkpoint(str(staged.parent), tag=staged.name, client_state=state, save_latest=False)
        if problem or writer.failure:
            raise problem or writer.failure  # type: ignore[misc]

    try:
        all_succeeded(write, f"saving iteration {engine.iteration}")
    except CheckpointError:
        if grid.rank == 0:
            discard(staged)
        raise
    records = _record_together(staged, grid)
    final = from_first_rank(lambda: commit(staged, records))
    keep = plan.config.checkpoint.keep_last_n_checkpoints
    if keep is not None:
        from_first_rank(lambda: keep_last(save, keep))
    dist.barrier()
    return final


def _record_together(staged: Path, grid: ParallelGrid) -> dict[str, FileRecord]:
    """Hash the staged files, each rank a share of them; the records of all files on every rank."""
    share: dict[str, FileRecord] = {}
    try:
        all_succeeded(lambda: share.update(record_share(staged, grid.rank, grid.world_size)), f"hashing {staged}")
    except CheckpointError:
        if grid.rank == 0:
            discard(staged)
        raise
    shares: list[dict[str, FileRecord]] = [{} for _ in range(grid.world_size)]
    dist.all_gather_object(shares, share)
    return {name: record for part in shares for name, record in part.items()}


def layout_of(plan: RunPlan) -> dict[str, Any]:
    """What decides the form of DeepSpeed's files; the optimizer's state fits this layout alone."""
    return {
        "pp": plan.grid.pp,
        "mp": plan.grid.mp,
        "dp": plan.grid.dp,
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
