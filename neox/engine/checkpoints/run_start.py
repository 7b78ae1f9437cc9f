"""The start of a run: which checkpoint it loads, which parts of it, and whether every machine has the same files.

`choose_start` runs on rank 0 only; every rank gets its `RunStart`. From top to bottom:

    save holds this run's checkpoints?   yes -> that directory is loaded, whatever `load` and `finetune` say
                                         no  -> the directory of `load`
    no directory, or `load` = `save` and nothing in it yet    -> INITIAL   initial weights
    the newest complete checkpoint of it, or that of `iteration`; its model is compared with the plan's
      `finetune`                                              -> FINETUNE  its weights only, at iteration 0
      `no_load_optim`                                         -> WEIGHTS   its weights and position
      else                                                    -> RESUME    also the optimizer, in whatever layout

`neox.engine.checkpoints.loading` does what is chosen.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch.distributed as dist

from neox.checkpoint import (
    WRITER,
    CheckpointReader,
    LoadedWeights,
    check_same_adapters,
    check_same_model,
    check_vocabulary,
    checkpoint_directories,
    find_checkpoint,
    padding_note,
    recover_replaced,
    saved_layout,
    supersede_after,
    supersede_all,
    why_incomplete,
)
from neox.checkpoint.remote.fetching import find_remote, partial_copy
from neox.checkpoint.remote.partial_copies import origin_of
from neox.checkpoint_files.finding import WITHOUT_LOAD, contains_checkpoints, step_of
from neox.config.sections.optimizer_table import goes_on, other_optimizer
from neox.engine.checkpoints.saving import layout_of
from neox.engine.distributed import all_succeeded, from_first_rank
from neox.errors import CheckpointError, os_errors
from neox.log import get_logger
from neox.plan import RunPlan
from neox.plan.run_identity import (
    FIRST_LOAD_KEYS,
    RunIdentity,
    find_run,
    other_run_message,
    read_identity,
    resumes_own_directory,
    run_identity,
)
from neox.storage import cached_address

_log = get_logger(__name__)
PROMPT = 1
"""Layer of the soft prompt."""
_WITHOUT_SAVED = "restore one from a copy, or move them all away to start from the beginning"


class StartMode(Enum):
    """What a run takes from a checkpoint."""

    INITIAL = auto()
    """Nothing: it begins with initial weights."""
    FINETUNE = auto()
    """The weights. The run begins at iteration 0, and positions, attention and head may differ (`finetune`)."""
    WEIGHTS = auto()
    """The weights and the position. The optimizer begins without a state (`no_load_optim`)."""
    RESUME = auto()
    """Everything, at any parallel degrees."""


@dataclass(frozen=True)
class RunStart:
    """How a run starts.

    Attributes:
        run: Identity of the run, which its checkpoints carry.
        checkpoint: Source of the weights; None for initial weights.
        mode: What is taken from the checkpoint.
        iteration: Number of completed steps.
        changed: What differs between the saved layout and this run's: (saved value, value here) by name.
        new_layers: Layers that the checkpoint lacks, and that keep their initial values.
        weights: Weights that are read: the trained ones, or their average.
        saved: Plain values that the checkpoint of a resumed run stores beside the weights, by name; features read
            theirs. Empty for a run that begins.
        own_directory: Whether the checkpoint is one of this run's own, in `save`.
    """

    run: RunIdentity
    checkpoint: Path | None = None
    mode: StartMode = StartMode.INITIAL
    iteration: int = 0
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    new_layers: frozenset[int] = frozenset()
    weights: LoadedWeights = "trained"
    saved: Mapping[str, Any] = field(default_factory=dict)
    own_directory: bool = False

    @property
    def has_new_prompt(self) -> bool:
        """Whether a soft prompt has its initial values."""
        return self.checkpoint is None or PROMPT in self.new_layers

    @property
    def source(self) -> tuple[str, LoadedWeights] | None:
        """The checkpoint, and which of its weights are read; None for initial weights."""
        if self.checkpoint is None:
            return None
        return str(self.checkpoint.resolve()), self.weights


def choose_start(plan: RunPlan, load: Path | None = None) -> RunStart:
    """Decide how the run starts, from the configuration and the disk. Only one rank calls it.

    Args:
        plan: The run.
        load: Directory to load from instead of that of the configuration.

    Raises:
        CheckpointError: If there is no complete checkpoint, or it belongs to another model.
    """
    keys = plan.config.checkpoint
    run = run_identity(plan.config)
    if keys.save is not None:
        # A save that was killed between its two renames has left the earlier checkpoint under another name.
        with os_errors(CheckpointError, f"save: {keys.save}: the rest of an interrupted save cannot be renamed"):
            recover_replaced(Path(keys.save))

    # Which directory. This run's own checkpoints go before `load`, and are resumed in any case: `finetune` and
    # `no_load_optim` were for its first start.
    own = _run_in_save(plan) if load is None else None
    mode = StartMode.RESUME
    if own is not None:
        load = own
    else:
        if load is None and keys.load is not None:
            load = Path(keys.load)
        if keys.finetune:
            mode = StartMode.FINETUNE
        elif keys.no_load_optim:
            mode = StartMode.WEIGHTS
    is_own_directory = load is not None and keys.save is not None and load.resolve() == Path(keys.save).resolve()
    if load is None or (is_own_directory and _is_empty(load)):
        return RunStart(run)
    # A launcher on another machine has fetched a checkpoint in object storage to its own disk; this one has none yet.
    address = cached_address(load, keys.checkpoint_cache_dir)
    if address is not None and not load.exists():
        partial_copy(find_remote(address, keys.iteration), load)

    # Which checkpoint in it, and whether it is of this model.
    way_out = _WITHOUT_SAVED if is_own_directory else WITHOUT_LOAD
    path = find_checkpoint(load, keys.iteration, verify=keys.checkpoint_verify, way_out=way_out)
    reader = _open_same_model(path, plan, finetune=mode is StartMode.FINETUNE)
    if is_own_directory:
        run = read_identity(path) or run
        supersede_after(load, path)

    # What is taken from it.
    if mode is StartMode.FINETUNE:
        _log.info("finetune: only the weights of %s are loaded; starting at iteration 0", path)
        return RunStart(run, path, mode, new_layers=reader.new_layers, weights=keys.load_weights)
    start = RunStart(
        run,
        path,
        mode,
        reader.iteration,
        saved=dict(reader.client_state),
        own_directory=is_own_directory,
    )
    if mode is StartMode.WEIGHTS:
        _log.info("no_load_optim: the optimizer starts without a state at iteration %d", reader.iteration)
        return start
    changed = _changed_layout(plan, saved_layout(path, reader.client_state))
    if "optimizer" in changed and not goes_on(*changed["optimizer"]):
        raise CheckpointError(other_optimizer(path, *changed["optimizer"]))
    if changed:
        differences = ", ".join(f"{name} {saved} -> {here}" for name, (saved, here) in changed.items())
        _log.info("the checkpoint was saved with another layout: %s", differences)
    return replace(start, changed=changed)


def start_before(plan: RunPlan, step: int) -> RunStart | None:
    """Return the start from the newest checkpoint of this run before a step; None if there is none.

    Only one rank calls it. Later checkpoints move to `superseded/`.

    Args:
        plan: The run.
        step: The step, counted from 1.

    Raises:
        CheckpointError: If the checkpoint is damaged.
    """
    save = plan.config.checkpoint.save
    if save is None:
        return None
    for directory in checkpoint_directories(Path(save)):
        iteration = step_of(directory) or 0
        if 0 < iteration < step:
            dropped = ("overwrite", *FIRST_LOAD_KEYS)
            config = plan.config.updated({"load": save, "iteration": iteration}, without=dropped)
            return choose_start(replace(plan, config=config), Path(save))
    return None


def _run_in_save(plan: RunPlan) -> Path | None:
    """Return `save` if it holds checkpoints of this run, which are resumed; None if it holds none.

    With `overwrite` checkpoints that are there are moved away.

    Raises:
        CheckpointError: If it holds checkpoints of another run.
    """
    config = plan.config
    keys = config.checkpoint
    if keys.save is None or resumes_own_directory(config):
        return None
    save = Path(keys.save)
    if keys.overwrite:
        supersede_all(save)
        return None
    found = find_run(save)
    if found is None:
        return None
    if not found.is_run_of(config):
        raise CheckpointError(other_run_message(config, found))
    _log.info("%s holds this run at iteration %d: it is resumed instead of `load`", save, found.iteration)
    return save


def _is_empty(load: Path) -> bool:
    """Return whether a directory has no checkpoint, complete or broken. A first start is meant then, and logged."""
    if contains_checkpoints(load):
        return False
    _log.info("load: %s holds no checkpoint yet; starting from initial weights", load)
    return True


def _open_same_model(path: Path, plan: RunPlan, *, finetune: bool) -> CheckpointReader:
    """Open a checkpoint, and warn of what may differ from the plan's model and does.

    Raises:
        CheckpointError: If it belongs to another model.
    """
    date = plan.config.checkpoint.gpt_neox_date
    reader = CheckpointReader(path, plan.layers, finetune=finetune, gpt_neox_date=date)
    for setting, (saved, here) in check_same_model(path, reader.args, plan, finetune=finetune).items():
        _log.warning("finetune: %s is %s in %s, %s here", setting, saved, path, here)
    check_vocabulary(path, reader.args, plan.vocab_size)
    check_same_adapters(path, reader.args, plan, finetune=finetune)
    note = padding_note(reader.args, plan)
    if note is not None:
        _log.warning("%s", note)
    return reader


def _changed_layout(plan: RunPlan, saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    there = {WRITER: "neox", "offload": False, **saved}
    changed = {}
    for name, here in {WRITER: "neox", **layout_of(plan)}.items():
        if there.get(name) != here:
            changed[name] = (there.get(name), here)
    return changed


def share_partial_copy(path: Path) -> None:
    """Make rank 0's partial copy of a checkpoint in object storage on every machine that does not see it.

    Each machine fetches the files that its ranks read. All ranks call it together.

    Args:
        path: Checkpoint that rank 0 chose. If it is no partial copy, nothing is done.

    Raises:
        CheckpointError: On all ranks, if any machine cannot make its copy.
    """
    origin = from_first_rank(lambda: origin_of(path))
    if origin is None:
        return
    address = f"{origin}/{path.name}"

    def copy() -> None:
        if not path.exists():
            partial_copy(find_remote(address), path.parent)

    all_succeeded(copy, f"copying {address}")


def check_local_copy(path: Path, *, hashes: bool) -> None:
    """Check a checkpoint once on every machine whose files at `path` are not those that rank 0 has checked.

    Machines without a shared disk each have a copy. A shared file system shows the same directory (inode number and
    time) everywhere, and nothing is read again. All ranks call it together.

    Args:
        path: Checkpoint that rank 0 chose and checked.
        hashes: Whether the content of files is compared with the manifest's hashes, too.

    Raises:
        CheckpointError: On all ranks, if any machine's copy is missing or not complete.
    """
    host = socket.gethostname()
    identity = _directory_identity(path)
    mine = (host, identity)
    of_ranks: list[tuple[str, tuple[int, int] | None]] = [mine] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    is_first_here = of_ranks.index(mine) == dist.get_rank()
    is_checked = identity == of_ranks[0][1]

    def check() -> None:
        if identity is None:
            raise CheckpointError(
                f"{path} does not exist on {host}: put `load` on a shared disk, or copy it to every machine"
            )
        if not is_first_here or is_checked:
            return
        problems = why_incomplete(path, hashes=hashes)
        if problems:
            raise CheckpointError(f"the copy on {host} is not complete: {'; '.join(problems)}")

    all_succeeded(check, f"checking {path}")


def _directory_identity(path: Path) -> tuple[int, int] | None:
    """Return what distinguishes two directories of the same name; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
