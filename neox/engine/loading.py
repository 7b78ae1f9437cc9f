"""Loading: choice of the checkpoint and of its parts, check of local copies, and the optimizer's state."""

from __future__ import annotations

import copy
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from neox.checkpoint import (
    WRITER,
    CheckpointReader,
    check_same_adapters,
    check_same_model,
    checkpoint_directories,
    find_checkpoint,
    load_file,
    mp_rank_file,
    padding_note,
    saved_layout,
    why_incomplete,
)
from neox.config.sections.optimizer_table import goes_on, other_optimizer
from neox.engine.collective_errors import all_succeeded, from_first_rank
from neox.engine.deepspeed_engines import build_deepspeed_engine, build_model
from neox.engine.deepspeed_log import hidden_stdout
from neox.engine.engine import Engine
from neox.engine.forward_check import compare_logits, fixed_logits
from neox.engine.reshard import load_resharded_optimizer, read_weights_fp32
from neox.engine.saving import layout_of
from neox.engine.weights import gathered, read_weights
from neox.errors import CheckpointError, ConfigError
from neox.log import get_logger
from neox.model import GPT, Embedding
from neox.objectives import build_objective
from neox.parallel import ParallelGrid
from neox.plan import RunPlan
from neox.tokenizer import tokenizer_of

_log = get_logger(__name__)


@dataclass(frozen=True)
class Start:
    """How a run starts.

    Attributes:
        checkpoint: Source of the weights; None for initial ones.
        iteration: Completed steps.
        with_optimizer: Whether the optimizer's state is loaded too.
        changed: How the saved layout differs from this run's, as `saved -> here` by name.
        new_prompt: Whether a soft prompt has its initial values.
    """

    checkpoint: Path | None = None
    iteration: int = 0
    with_optimizer: bool = False
    changed: Mapping[str, str] = field(default_factory=dict)
    new_prompt: bool = True


def open_engine(plan: RunPlan, grid: ParallelGrid, device: torch.device) -> Engine:
    """Build the engine with what the configuration says: initial weights, or what `load` holds.

    Raises:
        CheckpointError: On all ranks, for a checkpoint that is missing, broken, of another model, or whose optimizer
            state does not fit.
    """
    start = from_first_rank(lambda: choose_start(plan))
    if start.checkpoint is not None:
        check_local_copy(start.checkpoint, hashes=plan.config.checkpoint.checkpoint_verify)
    objective = build_objective(plan)
    model = build_model(plan, grid, objective, device)
    if start.checkpoint is not None:
        _read_model(model, plan, grid, start, start.checkpoint)
    if start.new_prompt and isinstance(model, GPT):
        _prompt_from_text(model, plan)
    engine = Engine(plan, grid, device, objective, *build_deepspeed_engine(plan, grid, model))
    _read_state(engine, start)
    return engine


def _prompt_from_text(model: GPT, plan: RunPlan) -> None:
    """Start the soft prompt as the vectors of a text's tokens, repeated or cut to its length."""
    settings = plan.config.model.soft_prompt_tuning
    if not plan.architecture.soft_prompt_tokens or settings is None or not settings.init_string:
        return

    def encode() -> list[int]:
        if not (ids := tokenizer_of(plan.config).encode(settings.init_string)):
            raise ConfigError("soft_prompt_tuning.init_string has no tokens; give another text, or remove it")
        return ids

    ids = from_first_rank(encode)
    count = plan.architecture.soft_prompt_tokens
    embedding, prompt = model.sequential[0], model.sequential[1]
    weight = next(prompt.parameters())
    rows = torch.tensor([ids[i % len(ids)] for i in range(count)], device=weight.device)
    with torch.no_grad(), gathered(embedding):
        vectors = cast(Embedding, embedding).word_embeddings(rows.unsqueeze(0)).squeeze(0)
    with torch.no_grad(), gathered(prompt, changed=True):
        weight.copy_(vectors)


def resume(engine: Engine, start: Start) -> None:
    """Load a checkpoint into an engine that may have trained; all ranks call it together. Raises CheckpointError."""
    assert start.checkpoint is not None
    assert start.with_optimizer, "an optimizer that has taken steps cannot be reset without its saved state"
    _read_model(engine.deepspeed_engine.module, engine.plan, engine.grid, start, start.checkpoint)
    _read_state(engine, start)


def check_local_copy(path: Path, *, hashes: bool) -> None:
    """Check a checkpoint once on every machine whose files at `path` are not those that rank 0 has checked.

    Machines without a shared disk each have a copy. A shared file system shows the same directory (inode number and
    time) everywhere, and nothing is read again. All ranks call it together.

    Args:
        path: Checkpoint that rank 0 chose and checked.
        hashes: As `verify` of `find_checkpoint`.

    Raises:
        CheckpointError: On all ranks.
    """
    mine = (socket.gethostname(), _directory_identity(path))
    seen: list[tuple[str, tuple[int, int] | None]] = [mine] * dist.get_world_size()
    dist.all_gather_object(seen, mine)
    first_here = seen.index(mine) == dist.get_rank()

    def check() -> None:
        if mine[1] is None:
            raise CheckpointError(
                f"{path} does not exist on {mine[0]}: put `load` on a shared disk, or copy it to every machine"
            )
        if first_here and mine[1] != seen[0][1] and (problems := why_incomplete(path, hashes=hashes)):
            raise CheckpointError(f"the copy on {mine[0]} is not complete: {'; '.join(problems)}")

    all_succeeded(check, f"checking {path}")


def _directory_identity(path: Path) -> tuple[int, int] | None:
    """Return what distinguishes two directories of the same name; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read_model(model: nn.Module, plan: RunPlan, grid: ParallelGrid, start: Start, path: Path) -> None:
    # Layer files hold weights rounded to the saved precision; the optimizer has them in fp32.
    finetune = plan.config.checkpoint.finetune
    read = read_weights_fp32 if "precision" in start.changed else partial(read_weights, finetune=finetune)
    all_succeeded(lambda: read(model, plan.layers, grid, path), f"loading {path}")


def _read_state(engine: Engine, start: Start) -> None:
    """Load the optimizer's state and set the engine's position."""
    if start.checkpoint is not None and start.with_optimizer:
        path = start.checkpoint
        # With offload the state is in host memory, which must not hold a second copy: it is read a parameter at a time.
        offloaded = engine.plan.config.deepspeed.zero_optimization.offloads_optimizer
        load = load_resharded_optimizer if start.changed or offloaded else load_optimizer
        all_succeeded(lambda: load(engine, path), f"loading the optimizer's state from {path}")
    engine.iteration = start.iteration
    if not start.with_optimizer:
        engine.schedule.seek(start.iteration)
    if start.checkpoint is not None and engine.plan.config.checkpoint.checkpoint_validation_with_forward_pass:
        path, logits = start.checkpoint, fixed_logits(engine)
        all_succeeded(lambda: compare_logits(path, logits, engine), f"checking the forward pass of {path}")


def choose_start(plan: RunPlan, load: Path | None = None) -> Start:
    """Decide how the run starts, from the configuration and the disk; call on one rank.

    Args:
        plan: The run.
        load: Replaces the key `load`.

    Raises:
        CheckpointError: If there is no complete checkpoint, or it is of another model.
    """
    keys = plan.config.checkpoint
    if load is None and keys.load is None:
        return Start()
    load = load or Path(str(keys.load))
    if keys.save is not None and load.absolute() == Path(keys.save).absolute() and _is_empty(load):
        _log.info("load: %s holds no checkpoint yet; starting from initial weights", load)
        return Start()
    path = find_checkpoint(load, keys.iteration, verify=keys.checkpoint_verify)
    reader = CheckpointReader(path, plan.layers, other_head=keys.finetune)
    for setting, (saved, here) in check_same_model(path, reader.args, plan, finetune=keys.finetune).items():
        _log.warning("finetune: %s is %s in %s, %s here", setting, saved, path, here)
    check_same_adapters(path, reader.args, plan, finetune=keys.finetune)
    if note := padding_note(reader.args, plan):
        _log.warning("%s", note)
    if keys.finetune:
        _log.info("finetune: only the weights of %s are loaded; starting at iteration 0", path)
        return Start(path, new_prompt=bool(reader.new_layers))
    if keys.no_load_optim:
        _log.info("no_load_optim: the optimizer starts without a state at iteration %d", reader.iteration)
        return Start(path, reader.iteration, new_prompt=False)
    changed = _changed_layout(plan, saved_layout(path, reader.client_state))
    if "optimizer" in changed and not goes_on(*(both := changed["optimizer"].split(" -> "))):
        raise CheckpointError(other_optimizer(path, *both))
    if changed:
        _log.info("the checkpoint was saved with another layout: %s", ", ".join(f"{k} {v}" for k, v in changed.items()))
    return Start(path, reader.iteration, with_optimizer=True, changed=changed, new_prompt=False)


def _is_empty(load: Path) -> bool:
    """Return whether a directory has no checkpoint, complete or broken, so that a first start is meant."""
    return not load.is_dir() or (not checkpoint_directories(load) and not any(load.glob("*.pt")))


def _changed_layout(plan: RunPlan, saved: Mapping[str, Any]) -> dict[str, str]:
    here = {WRITER: "neox", **layout_of(plan)}
    there = {WRITER: "neox", "offload": False, **saved}
    return {key: f"{there.get(key)} -> {here[key]}" for key in here if there.get(key) != here[key]}


def load_optimizer(engine: Engine, path: Path) -> None:
    """Load the optimizer's state that this rank saved in the same layout, the counters and the schedule.

    Raises:
        CheckpointError: If the checkpoint has no such state.
    """
    grid, ds_engine, optimizer = engine.grid, engine.deepspeed_engine, engine.optimizer
    settings = {"weight_decay", *engine.plan.config.optimizer.optimizer.params.options()}
    configured = [{key: group[key] for key in settings & group.keys()} for group in optimizer.param_groups]
    mp_rank = grid.pp_rank * grid.tp_size + grid.tp_rank
    optimizer_file = _own_optimizer_file(engine, path, mp_rank)
    client = load_file(_client_file(engine, path, mp_rank))
    if optimizer_file is None:
        if client.get("optimizer") is None:
            raise CheckpointError(f"{path} was saved without the optimizer's state (no_save_optim); set no_load_optim")
        ds_engine.optimizer.load_state_dict(copy.deepcopy(client["optimizer"]))
    else:
        parts: list[Any] = [None] * grid.dp_size
        parts[grid.dp_rank] = _partitioned_state(engine, load_file(optimizer_file)["optimizer_state_dict"])
        with hidden_stdout():
            ds_engine.optimizer.load_state_dict(parts, load_optimizer_states=True, load_from_fp32_weights=True)
    for group, numbers in zip(optimizer.param_groups, configured, strict=True):
        group.update(numbers)  # the configuration's, which the user may have changed
    engine.restore_counters(client)


def _partitioned_state(engine: Engine, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a ZeRO state ready to load: copied from the mapped file, clipping as configured, a working loss scaler."""
    state = copy.deepcopy(saved)
    optimizer = engine.deepspeed_engine.optimizer
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
    """Return this rank's file of a partitioned optimizer state, or None if the state is whole in the `mp_rank` file."""
    if not engine.divides_optimizer:
        return None
    prefix = "bf16_" if engine.plan.precision == "bf16" else ""
    file = path / f"{prefix}zero_pp_rank_{engine.grid.dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing (saved with no_save_optim?); set no_load_optim")
    return file
