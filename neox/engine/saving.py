"""Saving checkpoints: weights as layer files, the rest as DeepSpeed writes it, made final by one commit."""

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
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from torch import Tensor

from neox.checkpoint import (
    ORDER,
    FileRecord,
    commit,
    discard,
    identity_state,
    keep_last,
    layer_file,
    load_file,
    record_share,
    save_file,
    stage_directory,
    staging_path,
    write_config,
    write_layer,
)
from neox.engine.collective_errors import all_succeeded, from_first_rank
from neox.engine.engine import Engine
from neox.engine.forward_check import FILE as LOGITS
from neox.engine.forward_check import fixed_logits
from neox.engine.host_copies import HostCopies, snapshot
from neox.engine.optimizer_tensors import optimizer_order
from neox.engine.weights import write_weights
from neox.errors import CheckpointError
from neox.parallel import ParallelGrid
from neox.plan import RunPlan, StagePlan


class FileWriter(CheckpointEngine):  # type: ignore[misc]
    """Writer of DeepSpeed's files and of layer files.

    A failure of DeepSpeed's files is kept in `failure`, because raising it there would interrupt collective operations.

    Args:
        engine: The engine whose state is written.
        deferred: Keep copies in CPU memory until `write_queued`.
    """

    def __init__(self, engine: Engine, *, deferred: bool = False) -> None:
        self.name = "layer-files"
        self.deferred = deferred
        self._with_optimizer = not engine.plan.config.checkpoint.no_save_optim
        self._divided = engine.divides_optimizer
        self.failure: CheckpointError | None = None
        self.copies = HostCopies()
        self._queue: list[tuple[Path, Any]] = []

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: the directory exists."""

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Write one of DeepSpeed's own files.

        The optimizer's state is written once: DeepSpeed writes that of bf16 with stages and ZeRO 0 to both files.
        """
        if path.endswith("optim_states.pt"):
            if not self._with_optimizer:
                return
        elif self._divided or not self._with_optimizer:
            state_dict = {**state_dict, "optimizer": None}
        self.put(Path(path), state_dict)

    def put(self, path: Path, value: Any) -> None:
        """Write a file, or queue a copy of its content."""
        if self.deferred:
            self._queue.append((path, snapshot(value, self.copies)))
            return
        try:
            save_file(path, value)
        except CheckpointError as error:
            self.failure = error

    def put_layer(self, directory: Path, index: int, state: Mapping[str, Tensor], *, tp_rank: int) -> None:
        """Write or queue a layer file. Raises CheckpointError if the disk refuses."""
        if self.deferred:
            self.put(directory / layer_file(index, tp_rank), dict(state))
        else:
            write_layer(directory, index, tp_rank, state)

    def write_queued(self) -> None:
        """Write what is queued, and release each copy once it is on disk. Raises CheckpointError."""
        self.copies.wait()
        while self._queue:
            save_file(*self._queue.pop(0))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file safely."""
        return load_file(Path(path))

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Do nothing: `commit_files` commits."""
        return True


def save_checkpoint(engine: Engine, save: str | Path, client_state: Mapping[str, Any] | None = None) -> Path:
    """Write a checkpoint of the engine's iteration; all ranks call it together.

    Args:
        engine: The model in training.
        save: Directory of the run's checkpoints.
        client_state: Further values to store.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: On every rank if any rank could not write; earlier checkpoints are unchanged.
    """
    writer = FileWriter(engine)
    staged = stage_files(engine, save, writer, client_state)
    return commit_files(engine.plan, engine.grid, writer, staged)


def stage_files(
    engine: Engine, save: str | Path, writer: FileWriter, client_state: Mapping[str, Any] | None = None
) -> Path:
    """Pass the content of a checkpoint of the engine's iteration to `writer`; return the staging directory.

    Raises:
        CheckpointError: On every rank if any rank could not write.
    """
    plan, grid, ds_engine = engine.plan, engine.grid, engine.deepspeed_engine
    staged = staging_path(save, engine.iteration)
    from_first_rank(lambda: stage_directory(save, engine.iteration))
    ds_engine.checkpoint_engine = writer
    state = {
        **neox_client_state(plan, grid, engine.iteration),
        ORDER: optimizer_order(ds_engine.module, plan),
        **(client_state or {}),
    }
    logits = fixed_logits(engine) if plan.config.checkpoint.checkpoint_validation_with_forward_pass else None

    def write() -> None:
        problem: CheckpointError | None = None
        try:
            write_weights(ds_engine.module, plan.layers, grid, partial(writer.put_layer, staged, tp_rank=grid.tp_rank))
            if grid.rank == 0:
                write_config(staged, plan.config.to_flat())
        except CheckpointError as error:
            problem = error
        if logits is not None and grid.dp_rank == 0 and grid.tp_rank == 0:
            writer.put(staged / LOGITS, {"logits": logits, "precision": plan.precision})
        ds_engine.save_checkpoint(
            str(staged.parent), tag=staged.name, client_state=state, save_latest=False, exclude_frozen_parameters=True
        )
        problem = problem or writer.failure
        if problem is not None:
            raise problem

    with _discarded_on_failure(staged, grid):
        all_succeeded(write, f"saving iteration {engine.iteration}")
    return staged


def commit_files(
    plan: RunPlan, grid: ParallelGrid, writer: FileWriter, staged: Path, group: dist.ProcessGroup | None = None
) -> Path:
    """Write what `writer` has queued, hash all files, and make them the newest checkpoint.

    Args:
        plan: The run.
        grid: This rank's grid.
        writer: Writer that staged the files.
        staged: Staging directory.
        group: Group of all ranks if this is not training's thread.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: On every rank.
    """
    with _discarded_on_failure(staged, grid):
        if writer.deferred:
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
    """Hash the staged files, each rank a share of them; return the records of all files on every rank."""
    share: dict[str, FileRecord] = {}
    all_succeeded(lambda: share.update(record_share(staged, grid.rank, grid.world_size)), f"hashing {staged}", group)
    shares: list[dict[str, FileRecord]] = [{} for _ in range(grid.world_size)]
    dist.all_gather_object(shares, share, group=group)
    return {name: record for part in shares for name, record in part.items()}


def layout_of(plan: RunPlan) -> dict[str, Any]:
    """Return what decides the form of DeepSpeed's files; the optimizer's state fits this layout only."""
    return {
        "pp": plan.grid.pp_size,
        "mp": plan.grid.tp_size,
        "dp": plan.grid.dp_size,
        "zero_stage": plan.config.deepspeed.zero_optimization.stage,
        "precision": plan.precision,
        "optimizer": plan.config.optimizer.optimizer.name,
        "stages": [_stage_starts(stage) for stage in plan.stages],
        "offload": plan.config.deepspeed.zero_optimization.offloads_optimizer,
    }


def _stage_starts(stage: StagePlan) -> int | list[int]:
    """Return where the ranges of a stage start: one number if there is one range, as all files so far have it."""
    starts = [layers.start for layers in stage.ranges]
    return starts[0] if len(starts) == 1 else starts


def neox_client_state(plan: RunPlan, grid: ParallelGrid, iteration: int) -> dict[str, Any]:
    """Return what gpt-neox stores beside the weights, under its names, and the layout."""
    state: dict[str, Any] = {"iteration": iteration, "layout": layout_of(plan), **identity_state(plan)}
    if not plan.config.checkpoint.no_save_rng:
        state |= _random_states(grid)
    return state


def _random_states(grid: ParallelGrid) -> dict[str, Any]:
    """Return random states under the names that gpt-neox requires; our own runs seed every step from its number."""
    kind, keys, *rest = np.random.get_state()
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state(),
        "rng_tracker_states": grid.rng.get_states()["states"],
    }
