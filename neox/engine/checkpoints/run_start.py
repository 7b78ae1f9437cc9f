"""The start of a run on its ranks: its decision is verified before anything is changed, then carried out.

    all ranks  agree_on_start        rank 0 decides by `neox.decisions.checkpoint`, as the launcher
                 share_partial_copy  each machine fetches the files that its ranks read, if they are in object storage
                 damaged_copies      each machine compares its files with the manifest
    rank 0     begin_start           opens the checkpoint, compares its model with the plan's, moves later ones away

If the launcher's decision does not hold, all ranks end with `StaleStartError`: the launcher decides again, without the
damaged checkpoint, and this uses up no restart. Where no launcher follows the ranks, rank 0 decides again itself.

What is taken in which mode stands in `neox.plan.run_start`; `neox.engine.checkpoints.loading` takes it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from neox.checkpoint import (
    WRITER,
    CheckpointReader,
    LoadedWeights,
    check_trained_model,
    checkpoint_directories,
    padding_note,
    recover_replaced,
    saved_layout,
    supersede_after,
    supersede_all,
    why_incomplete,
    with_steps,
)
from neox.checkpoint.remote.fetching import find_remote, partial_copy
from neox.checkpoint.remote.partial_copies import origin_of
from neox.checkpoint_files.finding import WITHOUT_LOAD, contains_checkpoints, names_of_checkpoints, step_of
from neox.checkpoint_files.names import REPLACED, step_directory
from neox.config import Decision, apply_decisions
from neox.config.sections.optimizer_table import goes_on, other_optimizer
from neox.decisions.checkpoint import choose_checkpoint
from neox.decisions.schedule import decide_schedule, decide_warmup
from neox.engine.checkpoints.saving import layout_of
from neox.engine.distributed import all_succeeded, from_first_rank
from neox.errors import CheckpointError, NoCheckpointError, StaleStartError, os_errors
from neox.launch import has_launcher
from neox.log import get_logger
from neox.plan import RunPlan, resolve
from neox.plan.run_identity import RunIdentity, read_identity, run_identity
from neox.plan.run_start import FIRST_LOAD_KEYS, ChosenStart, StartMode, requested_start
from neox.storage import cached_address

_log = get_logger(__name__)
PROMPT = 1
"""Layer of the soft prompt."""


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
    mode: StartMode = StartMode.NEW
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


def agree_on_start(plan: RunPlan) -> tuple[RunPlan, ChosenStart]:
    """Decide how the run starts, and verify the checkpoint on every machine. All ranks call it together.

    Nothing is changed but copies of remote files.

    Returns:
        The plan, and the start. If rank 0 has decided, and the launcher did not see the checkpoint, schedule, warm-up
        and precision of the plan follow it.

    Raises:
        StaleStartError: On all ranks, if a launcher follows them, and decided otherwise or for a damaged checkpoint.
        CheckpointError: On all ranks, if there is no complete checkpoint, or it belongs to another run.
    """
    damaged: set[Path] = set()
    while True:
        chosen, decisions = from_first_rank(lambda: verified_choice(plan, damaged))
        problems: list[str] = []
        if chosen.checkpoint is not None:
            share_partial_copy(Path(chosen.checkpoint))
            hashes = plan.config.checkpoint.checkpoint_verify
            problems = damaged_copies(Path(chosen.checkpoint), hashes=hashes)
        if not problems:
            return _replanned(plan, decisions), chosen
        text = f"checkpoint {chosen.checkpoint} is not complete: {'; '.join(problems)}"
        if from_first_rank(has_launcher):
            raise StaleStartError(f"{text}. It is left out of the next start", chosen.checkpoint)
        _log.warning("%s; trying the one before", text)
        damaged.add(Path(str(chosen.checkpoint)))


def verified_choice(plan: RunPlan, damaged: Collection[Path] = ()) -> tuple[ChosenStart, tuple[Decision, ...]]:
    """Decide how the run starts, and compare it with what the launcher has decided. Only one rank calls it.

    Args:
        plan: The run, with the launcher's decision.
        damaged: Checkpoints that this start has found damaged.

    Returns:
        The start, and settings that follow from its checkpoint and that the launcher has not decided.

    Raises:
        StaleStartError: If a launcher follows the ranks, and has decided otherwise.
        CheckpointError: If there is no complete checkpoint, or it belongs to another run.
    """
    keys = plan.config.checkpoint
    launchers = plan.start
    if launchers is not None:
        damaged = {*damaged, *map(Path, launchers.damaged)}
    own = choose_checkpoint(plan.config, damaged)
    load = None if keys.load is None else Path(keys.load)
    if load is not None and own.start.directory == keys.load and own.start.checkpoint is None and not load.exists():
        address = cached_address(load, keys.checkpoint_cache_dir)
        if address is not None:
            # A launcher on another machine has fetched the checkpoint to its own disk; this one has none yet.
            partial_copy(find_remote(address, keys.iteration), load)
            own = choose_checkpoint(plan.config, damaged)
    for problem in own.problems:
        kind = NoCheckpointError if own.none_complete else CheckpointError
        raise kind(str(problem))
    start = own.start
    if start.mode is not StartMode.NEW and start.checkpoint is None:
        raise CheckpointError(_nothing_to_load(plan))
    is_same = False
    if launchers is not None:
        is_same = (launchers.mode, launchers.checkpoint, launchers.step) == (start.mode, start.checkpoint, start.step)
        if not is_same and not launchers.left_to_ranks and has_launcher():
            raise StaleStartError(
                f"the launcher has decided for {launchers.checkpoint or 'initial weights'}, and here the start is from "
                f"{start.checkpoint or 'initial weights'}: the directory has changed meanwhile, or is another one there"
            )
    if is_same or own.loaded is None:
        return start, own.decisions
    config = apply_decisions(plan.config, own.decisions)
    schedule = decide_schedule(config, own.loaded)
    for problem in schedule.problems:
        raise CheckpointError(str(problem))
    warmup = decide_warmup(config, own.loaded, config.training.train_iters)
    decisions = [*own.decisions, *schedule.decisions, *warmup.decisions]
    precision = own.loaded.precision
    is_automatic = any(decision.key == "precision" for decision in plan.decisions)
    if is_automatic and precision not in (None, plan.precision):
        reason = "`precision: auto` is that of the checkpoint"
        decisions.append(Decision("precision", precision, reason, config.source("precision")))
    return start, tuple(decisions)


def _replanned(plan: RunPlan, decisions: Sequence[Decision]) -> RunPlan:
    """Return the plan with settings that rank 0 has decided, because the launcher did not see the checkpoint."""
    if not decisions:
        return plan
    for reason in dict.fromkeys(decision.reason for decision in decisions):
        _log.info("%s", reason)
    config = apply_decisions(plan.config, decisions)
    return resolve(
        config,
        plan.grid.world_size,
        plan.vocab_size,
        decisions=(*plan.decisions, *decisions),
        device_family=plan.device_family,
        amounts=plan.amounts,
        start=plan.start,
    )


def begin_start(plan: RunPlan, chosen: ChosenStart) -> RunStart:
    """Open the checkpoint of a start, compare it with the plan, and move superseded checkpoints away.

    Only one rank calls it, after every machine has verified the checkpoint.

    Raises:
        CheckpointError: If the checkpoint belongs to another model, or a file cannot be moved.
    """
    config = plan.config
    save = None if config.checkpoint.save is None else Path(config.checkpoint.save)
    run = run_identity(config)
    if chosen.checkpoint is None:
        _make_room(save, chosen)
        if save is not None and requested_start(config).own_directory:
            _log.info("load: %s holds no checkpoint yet; starting from initial weights", save)
        return RunStart(run)
    path = Path(chosen.checkpoint)
    reader = _open_same_model(path, plan, finetune=chosen.mode is StartMode.FINETUNE)
    if chosen.own_directory:
        run = read_identity(path) or run
    changed: dict[str, tuple[Any, Any]] = {}
    if chosen.mode is StartMode.RESUME:
        changed = _changed_layout(plan, saved_layout(path, reader.client_state))
        if "optimizer" in changed and not goes_on(*changed["optimizer"]):
            raise CheckpointError(other_optimizer(path, *changed["optimizer"]))

    _make_room(save, chosen)
    if chosen.own_directory:  # the rest of an interrupted save has its name back
        path = path.with_name(path.name.removeprefix(REPLACED))
    _log.info("start: %s of %s at iteration %d", chosen.mode.value, path, chosen.step)
    if chosen.mode is StartMode.FINETUNE:
        return RunStart(run, path, chosen.mode, new_layers=reader.new_layers, weights=config.checkpoint.load_weights)
    if changed:
        differences = ", ".join(f"{name} {saved} -> {here}" for name, (saved, here) in changed.items())
        _log.info("the checkpoint was saved with another layout: %s", differences)
    return RunStart(
        run,
        path,
        chosen.mode,
        reader.iteration,
        changed,
        saved=dict(reader.client_state),
        own_directory=chosen.own_directory,
    )


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
            earlier = replace(plan, config=config, start=None)
            chosen, _ = verified_choice(earlier)
            problems = why_incomplete(directory, hashes=config.checkpoint.checkpoint_verify)
            if problems:
                raise CheckpointError(f"{directory} is not complete: {'; '.join(problems)}")
            return begin_start(earlier, chosen)
    return None


def _nothing_to_load(plan: RunPlan) -> str:
    """Return why nothing can be loaded, and what to do."""
    keys = plan.config.checkpoint
    load = Path(str(keys.load))
    if not load.is_dir():
        return f"load: {load} is not a directory, and there is nothing to resume from; {WITHOUT_LOAD}"
    if keys.iteration is not None and contains_checkpoints(load):
        names = names_of_checkpoints(load) or load.resolve().name
        return f"iteration: {load / step_directory(keys.iteration)} does not exist; {load} has: {names}"
    return f"load: no complete checkpoint in {load}: no global_stepN directories; {WITHOUT_LOAD}"


def _make_room(save: Path | None, chosen: ChosenStart) -> None:
    """Finish interrupted saves, and move checkpoints that the run leaves behind to `superseded/`."""
    if save is None:
        return
    # A save that was killed between its two renames has left the earlier checkpoint under another name.
    with os_errors(CheckpointError, f"save: {save}: the rest of an interrupted save cannot be renamed"):
        recover_replaced(save)
    if chosen.replaces_save:
        supersede_all(save)
    elif chosen.own_directory:
        name = Path(str(chosen.checkpoint)).name.removeprefix(REPLACED)
        supersede_after(save, save / name)


def _open_same_model(path: Path, plan: RunPlan, *, finetune: bool) -> CheckpointReader:
    """Open a checkpoint, and warn of what may differ from the plan's model and does.

    Raises:
        CheckpointError: If it belongs to another model.
    """
    date = plan.config.checkpoint.gpt_neox_date
    reader = CheckpointReader(path, plan.layers, finetune=finetune, gpt_neox_date=date)
    for setting, (saved, here) in check_trained_model(path, reader.args, plan, finetune=finetune).items():
        _log.warning("finetune: %s is %s in %s, %s here", setting, saved, path, here)
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


def damaged_copies(path: Path, *, hashes: bool) -> list[str]:
    """Check a checkpoint once on every machine, and return what is wrong anywhere. All ranks call it together.

    Machines without a shared disk each have a copy. A shared file system shows the same directory (inode number and
    time) everywhere, and one rank of the run reads it.

    Args:
        path: The checkpoint.
        hashes: Whether the content of files is compared with the manifest's hashes, too.

    Returns:
        The reasons why it is not complete, those of other machines than rank 0's with their names.

    Raises:
        CheckpointError: On all ranks, if a machine does not have it.
    """
    host = socket.gethostname()
    identity = _directory_identity(path)
    mine = (host, identity)
    of_ranks: list[tuple[str, tuple[int, int] | None]] = [mine] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    is_first_here = of_ranks.index(mine) == dist.get_rank()
    is_checked = identity == of_ranks[0][1] and dist.get_rank() != 0
    problems: list[str] = []

    def check() -> None:
        if identity is None:
            raise CheckpointError(
                f"{path} does not exist on {host}: put `load` on a shared disk, or copy it to every machine"
            )
        if not is_first_here or is_checked:
            return
        started = time.perf_counter()
        problems.extend(why_incomplete(path, hashes=hashes))
        seconds = max(time.perf_counter() - started, 1e-9)
        if not problems:
            checked = "sizes checked"
            if hashes:
                megabytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6
                checked = f"hashes of {megabytes:,.0f} MB checked, {megabytes / seconds:,.0f} MB/s"
            _log.info("loading checkpoint %s (%s)", with_steps(path), checked)

    all_succeeded(check, f"checking {path}")
    if dist.get_rank() != 0:
        problems = [f"the copy on {host}: {problem}" for problem in problems]
    gathered: list[list[str]] = [problems] * dist.get_world_size()
    dist.all_gather_object(gathered, problems)
    return [problem for of_rank in gathered for problem in of_rank]


def check_copies(path: Path, *, hashes: bool) -> None:
    """Make every machine have a checkpoint, and check it there. All ranks call it together.

    Args:
        path: The checkpoint.
        hashes: Whether the content of files is compared with the manifest's hashes, too.

    Raises:
        CheckpointError: On all ranks, if it is missing or damaged on a machine.
    """
    share_partial_copy(path)
    problems = damaged_copies(path, hashes=hashes)
    if problems:
        raise CheckpointError(f"{path} is not complete: {'; '.join(problems)}")


def _directory_identity(path: Path) -> tuple[int, int] | None:
    """Return what distinguishes two directories of the same name; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
