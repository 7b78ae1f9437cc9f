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
    ROWS,
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
    write_layer,
)
from neox.engine.checkpoints.divided_experts import WholeStates, gather_states
from neox.engine.distributed import all_succeeded, from_first_rank
from neox.engine.engine import Engine
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

    Attributes:
        experts: The optimizer's state of all experts, if data ranks divide them.
    """

    def __init__(self, engine: Engine) -> None:
        self.name = "layer-files"
        self.failure: CheckpointError | None = None
        self._with_optimizer = not engine.plan.config.checkpoint.no_save_optim
        self._divided = engine.model.divides_optimizer
        self.experts = WholeStates()

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
        elif self.experts.states:
            state_dict = {**state_dict, "optimizer": self.experts.put_into(state_dict["optimizer"])}
        self.put(Path(path), state_dict)

    def put(self, path: Path, value: Any) -> None:
        """Write a file."""
        try:
            save_file(path, value)
        except CheckpointError as error:
            self.failure = error

    def put_layer(self, directory: Path, index: int, state: Mapping[str, Tensor], *, tp_rank: int) -> None:
        """Write a layer file. Raises CheckpointError if the disk refuses."""
        write_layer(directory, index, tp_rank, state)

    def finish(self) -> None:
        """Write what is not written yet. Raises CheckpointError."""

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file safely."""
        return load_file(Path(path))

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Do nothing: `commit_files` commits."""
        return True


def save_checkpoint(engine: Engine, save: str | Path) -> Path:
    """Write a checkpoint of the engine's iteration; all ranks call it together.

    Args:
        engine: The engine whose state is written.
        save: Directory of the run's checkpoints.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: On every rank, if any rank could not write. Earlier checkpoints are unchanged.
    """
    writer = FileWriter(engine)
    staged = stage_files(engine, save, writer)
    return commit_files(engine.plan, engine.grid, writer, staged)


def stage_files(engine: Engine, save: str | Path, writer: FileWriter) -> Path:
    """Pass the content of a checkpoint of the engine's iteration to a writer, and return the staging directory.

    Raises:
        CheckpointError: On every rank, if any rank could not write.
    """
    plan = engine.plan
    grid = engine.grid
    deepspeed_engine = engine.deepspeed_engine
    staged = staging_path(save, engine.iteration)
    from_first_rank(lambda: stage_directory(save, engine.iteration))
    deepspeed_engine.checkpoint_engine = writer
    client_state = _client_state(engine)
    files: dict[str, Any] = {}
    for feature in engine.features:
        files |= feature.files(engine)
    writer.experts = gather_states(engine)

    def write() -> None:
        problem: CheckpointError | None = None
        put_layer = partial(writer.put_layer, staged, tp_rank=grid.tp_rank)
        try:
            write_weights(deepspeed_engine.module, plan.layers, grid, put_layer)
            if grid.rank == 0:
                write_config(staged, plan.config.to_flat())
                engine.run_files.write(staged)
        except CheckpointError as error:
            problem = error
        for name, content in files.items():
            writer.put(staged / name, content)
        # Collective operations: reached on every rank, also after a failure.
        deepspeed_engine.save_checkpoint(
            str(staged.parent),
            tag=staged.name,
            client_state=client_state,
            save_latest=False,
            exclude_frozen_parameters=True,
        )
        problem = problem or writer.failure
        if problem is not None:
            raise problem

    with _discarded_on_failure(staged, grid):
        all_succeeded(write, f"saving iteration {engine.iteration}")
    return staged


def _client_state(engine: Engine) -> dict[str, Any]:
    """Return what stands next to the weights: gpt-neox's part, and what features need to go on."""
    state = neox_client_state(engine.plan, engine.grid, engine.iteration)
    state[ORDER] = optimizer_order(engine.deepspeed_engine.module, engine.plan)
    return state | engine.saved_state()


def commit_files(
    plan: RunPlan, grid: ParallelGrid, writer: FileWriter, staged: Path, group: dist.ProcessGroup | None = None
) -> Path:
    """Finish the files, hash all of them, and make them the newest checkpoint.

    Args:
        plan: The run.
        grid: This rank's grid.
        writer: Writer that staged the files.
        staged: Staging directory.
        group: Group of all ranks for a thread that runs next to training; the default group if None.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: On every rank, if any rank could not write.
    """
    with _discarded_on_failure(staged, grid):
        all_succeeded(writer.finish, f"saving {staged}", group)
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
    records: dict[str, FileRecord] = {}
    for part in shares:
        records |= part
    return records


def layout_of(plan: RunPlan) -> dict[str, Any]:
    """Return the layout of a run: everything that decides the form of DeepSpeed's files."""
    return {
        "pp": plan.grid.pp_size,
        "mp": plan.grid.tp_size,
        "dp": plan.grid.dp_size,
        "ep": plan.grid.ep_size,
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
    """Return what gpt-neox stores next to the weights, under its names, and the layout."""
    state: dict[str, Any] = {"iteration": iteration, "layout": layout_of(plan), **identity_state(plan)}
    state[ROWS] = "blocks"
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
