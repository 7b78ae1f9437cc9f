"""Loading: which checkpoint, what of it, and the optimizer's state back into DeepSpeed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neox.checkpoint import (
    WRITER,
    CheckpointReader,
    check_same_model,
    checkpoint_directories,
    find_checkpoint,
    load_file,
    mp_rank_file,
    padding_note,
    saved_layout,
)
from neox.config import RunPlan
from neox.engine.agreement import all_succeeded, from_first_rank
from neox.engine.any_degrees import read_optimizer_any, read_weights_fp32
from neox.engine.bodies import build_body, build_model
from neox.engine.deepspeed_log import unprinted
from neox.engine.engine import Engine
from neox.engine.forward_check import compare_logits, fixed_logits
from neox.engine.own_copies import check_own_copy
from neox.engine.saving import layout_of
from neox.engine.weights import read_weights
from neox.errors import CheckpointError
from neox.log import get_logger
from neox.parallel import ParallelGrid

_log = get_logger(__name__)


@dataclass(frozen=True)
class Start:
    """How a run starts. checkpoint: where weights come from, None for initial ones.
    iteration: completed steps. with_optimizer: whether the optimizer goes on too. changed: how the layout it was saved
    with differs from this run's."""

    checkpoint: Path | None = None
    iteration: int = 0
    with_optimizer: bool = False
    changed: Mapping[str, str] = field(default_factory=dict)


def open_engine(plan: RunPlan, grid: ParallelGrid, device: torch.device) -> Engine:
    """Build the engine and put it where the configuration says: initial weights, or what `load` holds.

    Raises CheckpointError, on all ranks, for a checkpoint that is missing, broken, of another model, or whose optimizer
    state does not fit.
    """
    start = from_first_rank(lambda: choose_start(plan))
    if start.checkpoint is not None:
        check_own_copy(start.checkpoint, hashes=plan.config.checkpoint.checkpoint_verify)
    model = build_model(plan, grid, device)
    if start.checkpoint is not None:
        _read_model(model, plan, grid, start, start.checkpoint)
    body, adamw = build_body(plan, grid, model)
    engine = Engine(plan, grid, device, body, adamw)
    _read_rest(engine, start)
    return engine


def take_up(engine: Engine, start: Start) -> None:
    """Put an engine where `start` says, whatever it did before; all ranks call it together. Raises CheckpointError."""
    assert start.checkpoint is not None
    assert start.with_optimizer, "without its state an optimizer that has already moved cannot start anew"
    _read_model(engine.body.module, engine.plan, engine.grid, start, start.checkpoint)
    _read_rest(engine, start)


def _read_model(model: nn.Module, plan: RunPlan, grid: ParallelGrid, start: Start, path: Path) -> None:
    # Layer files hold weights rounded to the saved precision; the optimizer has them in fp32.
    read = read_weights_fp32 if "precision" in start.changed else read_weights
    all_succeeded(lambda: read(model, plan.layers, grid, path), f"loading {path}")


def _read_rest(engine: Engine, start: Start) -> None:
    if start.checkpoint is not None and start.with_optimizer:
        path = start.checkpoint
        read = read_optimizer_any if start.changed else read_optimizer
        all_succeeded(lambda: read(engine, path), f"loading the optimizer's state from {path}")
    engine.iteration = start.iteration
    if not start.with_optimizer:
        engine.schedule.seek(start.iteration)
    if start.checkpoint is not None and engine.plan.config.checkpoint.checkpoint_validation_with_forward_pass:
        path, logits = start.checkpoint, fixed_logits(engine)
        all_succeeded(lambda: compare_logits(path, logits, engine), f"checking the forward pass of {path}")


def choose_start(plan: RunPlan, load: Path | None = None) -> Start:
    """Decide from the configuration and the disk how the run starts; call on one rank. load: in place of the key's."""
    keys = plan.config.checkpoint
    if load is None and keys.load is None:
        return Start()
    load = load or Path(str(keys.load))
    if keys.save is not None and load.absolute() == Path(keys.save).absolute() and _holds_nothing(load):
        _log.info("load: %s holds no checkpoint yet; starting from initial weights", load)
        return Start()
    path = find_checkpoint(load, keys.iteration, verify=keys.checkpoint_verify)
    reader = CheckpointReader(path, plan.layers)
    check_same_model(path, reader.args, plan)
    if note := padding_note(reader.args, plan):
        _log.warning("%s", note)
    if keys.finetune:
        _log.info("finetune: weights only from %s, starting at iteration 0", path)
        return Start(path)
    if keys.no_load_optim:
        _log.info("no_load_optim: the optimizer starts anew at iteration %d", reader.iteration)
        return Start(path, reader.iteration)
    changed = _changed_layout(plan, saved_layout(path, reader.client_state))
    if changed:
        _log.info("the checkpoint was saved with another layout: %s", ", ".join(f"{k} {v}" for k, v in changed.items()))
    return Start(path, reader.iteration, with_optimizer=True, changed=changed)


def _holds_nothing(load: Path) -> bool:
    """Whether a directory has no checkpoint, whole or broken, so that a first start is meant."""
    return not load.is_dir() or (not checkpoint_directories(load) and not any(load.glob("*.pt")))


def _changed_layout(plan: RunPlan, saved: Mapping[str, Any]) -> dict[str, str]:
    """What differs between the saved layout and this run's: `saved -> here` by name, empty if they are the same."""
    here = {WRITER: "neox", **layout_of(plan)}
    there = {WRITER: "neox", **saved}
    return {key: f"{there.get(key)} -> {here[key]}" for key in here if there.get(key) != here[key]}


def read_optimizer(engine: Engine, path: Path) -> None:
    """Give DeepSpeed's optimizer the state that this rank saved in the same layout; counters and schedule too."""
    grid, body, adamw = engine.grid, engine.body, engine.adamw
    configured = [{key: group[key] for key in ("weight_decay", "betas", "eps")} for group in adamw.param_groups]
    mp_rank = grid.pp_rank * grid.tp_size + grid.tp_rank
    optimizer_file = _own_optimizer_file(engine, path, mp_rank)
    client = load_file(_client_file(engine, path, mp_rank))
    if optimizer_file is None:
        if client.get("optimizer") is None:
            raise CheckpointError(f"{path} was saved without the optimizer's state (no_save_optim); set no_load_optim")
        body.optimizer.load_state_dict(copy.deepcopy(client["optimizer"]))
    else:
        parts: list[Any] = [None] * grid.dp_size
        parts[grid.dp_rank] = _divided_state(engine, load_file(optimizer_file)["optimizer_state_dict"])
        with unprinted():
            body.optimizer.load_state_dict(parts, load_optimizer_states=True, load_from_fp32_weights=True)
    for group, settings in zip(adamw.param_groups, configured, strict=True):
        group.update(settings)  # the configuration's, which may have changed on purpose
    body.global_steps = client["global_steps"]
    body.global_samples = client["global_samples"]
    body.skipped_steps = client["skipped_steps"]
    engine.schedule.load_state_dict(client["lr_scheduler"])


def _divided_state(engine: Engine, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a ZeRO state ready to load: out of the mapped file, clipping as configured, a loss scaler that works."""
    state = copy.deepcopy(saved)
    optimizer = engine.body.optimizer
    if "clip_grad" in state:
        state["clip_grad"] = optimizer.clip_grad
    if "loss_scaler" in state:
        vars(optimizer.loss_scaler).update(vars(state["loss_scaler"]))
        state["loss_scaler"] = optimizer.loss_scaler
    return state


def _client_file(engine: Engine, path: Path, mp_rank: int) -> Path:
    if engine.plan.config.deepspeed.zero_optimization.stage == 3:
        return path / f"zero_pp_rank_{engine.grid.dp_rank}_mp_rank_{mp_rank:02d}_model_states.pt"
    return path / mp_rank_file(mp_rank)


def _own_optimizer_file(engine: Engine, path: Path, mp_rank: int) -> Path | None:
    """This rank's file of a divided optimizer state, or None where the state is whole in the `mp_rank` file."""
    if not hasattr(engine.body.optimizer, "dp_process_group"):
        return None
    prefix = "bf16_" if engine.plan.precision == "bf16" else ""
    file = path / f"{prefix}zero_pp_rank_{engine.grid.dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing (saved with no_save_optim?); set no_load_optim")
    return file
