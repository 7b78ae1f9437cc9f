"""Saving a checkpoint: one save from top to bottom. All ranks of a run do it together, in this order.

    1  all ranks   features may refuse (`Trainer.save` calls `before_save`)
    2  rank 0      creates an empty directory `.staging-global_stepN`, and removes what killed saves have left
    3  all ranks   collect the state: of features, of the run, and the optimizer's of experts that data ranks divide
    4  each rank   writes its files into the staging directory:
                     layer_*            weights, by data rank 0 of each stage and tensor rank
                     configs, run files by rank 0
                     files of features  such as parts of the averaged weights
                     *_states.pt        DeepSpeed's files: counters, loss scale, optimizer, client state
    5  all ranks   agree that each rank could write
    6  each rank   hashes a share of all files
    7  rank 0      makes the checkpoint final (`neox.checkpoint.commit`): manifest, rename to `global_stepN`, `latest`
    8  rank 0      deletes checkpoints beyond `keep_last_n_checkpoints`

`stage_checkpoint` does 2 to 5, `publish_checkpoint` 6 to 8. If a rank fails in 3 to 6, rank 0 removes the staging
directory, and every rank raises. With `async_save` step 4 only copies to CPU memory; a thread then writes the files and
does 6 to 8 (`background_saves`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
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
    record_share,
    save_file,
    stage_directory,
    staging_path,
    write_config,
    write_layer,
)
from neox.checkpoint.optimizer.file_formats import state_numbers
from neox.config.sections.optimizer_kind import BLOCK, SCALES, VALUES
from neox.engine.distributed import all_succeeded, from_first_rank
from neox.engine.engine import Engine
from neox.engine.optimizer_tensors import optimizer_order
from neox.engine.weights import write_weights
from neox.errors import CheckpointError
from neox.optim import planned_groups
from neox.parallel import ParallelGrid, gather_experts, holds_divided_experts
from neox.plan import RunPlan

_OPTIMIZER_FILE = "optim_states.pt"
"""End of the names of DeepSpeed's files that hold nothing but the optimizer's state."""
_NAMED_PROBLEMS = 3


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
    files = CheckpointFiles()
    staged = stage_checkpoint(engine, save, files)
    return publish_checkpoint(engine.plan, engine.grid, files, staged)


class CheckpointFiles:
    """Writes the files of a checkpoint, each at once.

    A file that cannot be written is noted and not raised: the caller still has collective operations to enter.

    Attributes:
        problems: Why files could not be written.
    """

    def __init__(self) -> None:
        self.problems: list[CheckpointError] = []

    def put(self, path: Path, value: Any) -> None:
        """Write a file of tensors and plain values."""
        try:
            save_file(path, value)
        except CheckpointError as error:
            self.problems.append(error)

    def put_layer(self, directory: Path, index: int, state: Mapping[str, Tensor], *, tp_rank: int) -> None:
        """Write a layer file."""
        try:
            write_layer(directory, index, tp_rank, state)
        except CheckpointError as error:
            self.problems.append(error)

    def finish(self) -> None:
        """Complete what `put` has only begun; nothing here.

        Raises:
            CheckpointError: If a file could not be written.
        """

    def raise_problems(self) -> None:
        """Raise a CheckpointError that names the first problems and counts the others, if there are any."""
        if not self.problems:
            return
        first = self.problems[0]
        if len(self.problems) == 1:
            raise first
        messages = [str(problem) for problem in self.problems]
        if len(messages) > _NAMED_PROBLEMS:
            messages[_NAMED_PROBLEMS:] = [f"{len(messages) - _NAMED_PROBLEMS} more files could not be written"]
        raise CheckpointError("; ".join(messages)) from first


def stage_checkpoint(engine: Engine, save: str | Path, files: CheckpointFiles) -> Path:
    """Write a checkpoint of the engine's iteration into a staging directory, which is returned.

    Args:
        engine: The engine whose state is written.
        save: Directory of the run's checkpoints.
        files: Writes the files.

    Raises:
        CheckpointError: On every rank, if any rank could not write.
    """
    staged = staging_path(save, engine.iteration)
    from_first_rank(lambda: stage_directory(save, engine.iteration))
    with _discarded_on_failure(staged, engine.grid):
        # Collected first, because it takes collective operations, which a rank whose disk is full must not miss.
        client_state = neox_client_state(engine.plan, engine.grid, engine.iteration)
        client_state[ORDER] = optimizer_order(engine.deepspeed_engine.module, engine.plan)
        client_state |= engine.saved_state()
        files_of_features: dict[str, Any] = {}
        for feature in engine.features:
            files_of_features |= feature.files(engine)
        experts = gather_expert_states(engine)

        def write() -> None:
            _write_weights_and_run(engine, staged, files)
            for name, content in files_of_features.items():
                files.put(staged / name, content)
            _write_deepspeed_files(engine, staged, files, client_state, experts)
            files.raise_problems()

        all_succeeded(write, f"saving iteration {engine.iteration}")
    return staged


def _write_weights_and_run(engine: Engine, staged: Path, files: CheckpointFiles) -> None:
    """Write this rank's layer files, and on rank 0 the configuration and what checkpoints say of the run."""
    grid = engine.grid
    put_layer = partial(files.put_layer, staged, tp_rank=grid.tp_rank)
    write_weights(engine.deepspeed_engine.module, engine.plan.layers, grid, put_layer)
    if grid.rank == 0:
        try:
            write_config(staged, engine.plan.config.to_flat())
            engine.run_files.write(staged)
        except CheckpointError as error:
            files.problems.append(error)


def _write_deepspeed_files(
    engine: Engine, staged: Path, files: CheckpointFiles, client_state: dict[str, Any], experts: WholeStates
) -> None:
    """Let DeepSpeed collect the state of its engine and optimizer, and pass each file to `files`.

    Its `save_checkpoint` has collective operations, so every rank calls it, even if its disk is full.
    """
    deepspeed_engine = engine.deepspeed_engine
    its_own = deepspeed_engine.checkpoint_engine
    deepspeed_engine.checkpoint_engine = _DeepSpeedFiles(engine, files, experts)
    try:
        deepspeed_engine.save_checkpoint(
            str(staged.parent),
            tag=staged.name,
            client_state=client_state,
            save_latest=False,
            exclude_frozen_parameters=True,
        )
    finally:
        deepspeed_engine.checkpoint_engine = its_own


class _DeepSpeedFiles(CheckpointEngine):  # type: ignore[misc]
    """What DeepSpeed's `save_checkpoint` hands its files to. It calls `save` for each; the other methods do nothing.

    Args:
        engine: The engine whose state is written.
        files: Writes the files.
        experts: The optimizer's state of all experts, if data ranks divide them.
    """

    def __init__(self, engine: Engine, files: CheckpointFiles, experts: WholeStates) -> None:
        super().__init__()
        self.name = "layer-files"
        self._files = files
        self._experts = experts
        self._saves_optimizer = not engine.plan.config.checkpoint.no_save_optim
        self._divides_optimizer = engine.model.divides_optimizer

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Write one of DeepSpeed's files, so that the optimizer's state is in one kind of file only.

        optimizer               mp_rank_MM_model_states.pt        ..._optim_states.pt
        ----------------------  --------------------------------  ------------------------------
        with `no_save_optim`    everything but the optimizer      not written
        divided by DeepSpeed    everything but the optimizer      the part of each data rank
        whole on each rank      with the optimizer, and with the  (DeepSpeed has no such file)
                                states of all experts

        DeepSpeed itself stores a divided optimizer twice with bf16, stages and ZeRO 0.
        """
        if path.endswith(_OPTIMIZER_FILE):
            if self._saves_optimizer:
                self._files.put(Path(path), state_dict)
            return
        optimizer = state_dict["optimizer"]
        if self._divides_optimizer or not self._saves_optimizer:
            optimizer = None
        elif self._experts.states:
            optimizer = self._experts.put_into(optimizer)
        self._files.put(Path(path), {**state_dict, "optimizer": optimizer})

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: the staging directory exists."""

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Do nothing: `publish_checkpoint` makes all files final at once."""
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        """Refuse: checkpoints are read by `neox.engine.checkpoints.loading`."""
        raise NotImplementedError(path)


def publish_checkpoint(
    plan: RunPlan, grid: ParallelGrid, files: CheckpointFiles, staged: Path, group: dist.ProcessGroup | None = None
) -> Path:
    """Finish the staged files, hash all of them, and make them the newest checkpoint.

    Args:
        plan: The run.
        grid: This rank's grid.
        files: Writer that staged the files.
        staged: Staging directory.
        group: Process group of all ranks for a background save; None: the default group.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: On every rank, if any rank could not write.
    """
    with _discarded_on_failure(staged, grid):
        all_succeeded(files.finish, f"saving {staged}", group)
        hash_share = partial(record_share, staged, grid.rank, grid.world_size)
        share = all_succeeded(hash_share, f"hashing {staged}", group)
        shares: list[dict[str, FileRecord]] = [{} for _ in range(grid.world_size)]
        dist.all_gather_object(shares, share, group=group)
    records: dict[str, FileRecord] = {}
    for of_rank in shares:
        records |= of_rank
    # A failed `commit` cleans up by itself: it knows whether the staging directory has got its final name already.
    final = from_first_rank(lambda: commit(staged, records), group)
    keep = plan.config.checkpoint.keep_last_n_checkpoints
    if keep is not None:
        from_first_rank(lambda: keep_last(staged.parent, keep), group)
    return final


@contextmanager
def _discarded_on_failure(staged: Path, grid: ParallelGrid) -> Iterator[None]:
    """Remove the staging directory if the context ends with any exception."""
    try:
        yield
    except BaseException:
        if grid.rank == 0:
            discard(staged)
        raise


# What DeepSpeed's files hold of a run besides its own counters.


def neox_client_state(plan: RunPlan, grid: ParallelGrid, iteration: int) -> dict[str, Any]:
    """Return what gpt-neox stores beside the weights, under its names, and the layout."""
    state: dict[str, Any] = {"iteration": iteration, "layout": layout_of(plan), **identity_state(plan)}
    state[ROWS] = "blocks"
    if plan.config.checkpoint.no_save_rng:
        return state
    # gpt-neox requires random states. Our own runs do not read them: they seed every step from its number.
    kind, keys, *rest = np.random.get_state()
    torch_state = torch.get_rng_state()
    state["random_rng_state"] = random.getstate()
    state["np_rng_state"] = (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)
    state["torch_rng_state"] = torch_state
    state["cuda_rng_state"] = get_accelerator().get_rng_state().clone()  # of any accelerator; gpt-neox's name
    state["rng_tracker_states"] = grid.rng.get_states()["states"]
    return state


def layout_of(plan: RunPlan) -> dict[str, Any]:
    """Return the layout of a run: everything that decides the form of DeepSpeed's files."""
    stages: list[int | list[int]] = []
    for stage in plan.stages:
        starts = [layers.start for layers in stage.ranges]
        # An int for a single range, as in the files of all former versions, else a list.
        stages.append(starts[0] if len(starts) == 1 else starts)
    return {
        "pp": plan.grid.pp_size,
        "mp": plan.grid.tp_size,
        "dp": plan.grid.dp_size,
        "ep": plan.grid.ep_size,
        "zero_stage": plan.config.deepspeed.zero_optimization.stage,
        "precision": plan.precision,
        "optimizer": plan.config.optimizer.optimizer.name,
        "stages": stages,
        "offload": plan.config.deepspeed.zero_optimization.offloads_optimizer,
    }


# Experts that data ranks divide. Without ZeRO DeepSpeed writes the optimizer's state of data rank 0 only. So that a
# checkpoint does not depend on the expert degree, the states of its experts are replaced by those of all experts.


@dataclass(frozen=True)
class WholeStates:
    """The optimizer's tensors of all experts, by their place in the optimizer's state.

    Attributes:
        states: Number of a parameter in torch's state dict -> its states by name.
        weights: Number of a group and position in it -> fp32 weights, for wrappers that keep copies of weights.
    """

    states: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    weights: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)

    def put_into(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with these tensors in place of this rank's."""
        if "optimizer_state_dict" not in state:
            return {**state, "state": {**state["state"], **self.states}}
        # The wrapper of fp16, and of bf16 without ZeRO, stores its fp32 copies next to torch's state dict.
        copies = [list(group) for group in state["fp32_groups"]]
        for (group, position), weight in self.weights.items():
            copies[group][position] = weight
        inner = self.put_into(state["optimizer_state_dict"])
        return {**state, "optimizer_state_dict": inner, "fp32_groups": copies}


@torch.no_grad()
def gather_expert_states(engine: Engine) -> WholeStates:
    """Gather the optimizer's tensors of experts; all ranks call it together. Only the first data rank keeps them."""
    grid = engine.grid
    if grid.ep_size == 1 or engine.model.divides_optimizer:
        return WholeStates()
    states: dict[int, dict[str, Tensor]] = {}
    weights: dict[tuple[int, int], Tensor] = {}
    number = 0
    planned = planned_groups(engine.plan, engine.deepspeed_engine.module.named_parameters())
    for index, (group, inner) in enumerate(zip(planned, engine.optimizer.param_groups, strict=True)):
        for position, parameter in enumerate(group["params"]):
            tensor = inner["params"][position]
            if holds_divided_experts(parameter):
                whole = _gathered_states(engine.optimizer.state[tensor], tensor, grid)
                weight = gather_experts(tensor.detach(), grid)
                if grid.dp_rank == 0:
                    states[number] = whole
                    weights[index, position] = weight
            number += 1
    return WholeStates(states, weights)


def _gathered_states(states: Mapping[str, Tensor], tensor: Tensor, grid: ParallelGrid) -> dict[str, Tensor]:
    """Return the states of all experts.

    States of 8 bits have a scale for each block of elements. If this rank's experts end within a block, the blocks of
    all experts are others. Then the numbers are gathered in fp64, which holds them exactly.

    Args:
        states: States of this rank's experts.
        tensor: Their weights in the optimizer.
        grid: Process groups.
    """
    whole: dict[str, Tensor] = {}
    ends_within_block = tensor.numel() % BLOCK != 0
    for name, value in states.items():
        is_coded = name + SCALES in states
        if is_coded and ends_within_block:
            whole[name] = gather_experts(state_numbers(states, name, 0, value.numel()).view_as(value), grid)
        elif name.endswith((SCALES, VALUES)) and ends_within_block:
            continue
        elif value.shape == tensor.shape or name.endswith(SCALES):
            whole[name] = gather_experts(value, grid)
        else:
            whole[name] = value  # the counter of steps, and the table of codes
    return whole
