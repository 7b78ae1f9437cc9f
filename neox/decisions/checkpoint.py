"""Which checkpoint a run starts from, and what of it: decided here for each start and restart, and nowhere else.

    overwrite, and `load` is no `save`       checkpoints in `save` do not count
    `save` contains this run                 it is resumed, whatever `load`, `finetune` and `no_load_optim` say;
                                             without another `load`, from the step of `iteration`
    `save` contains another run              refused, unless `load` names the same directory
    no `load`, or nothing there yet          NEW
    `finetune`, `no_load_optim`, neither     FINETUNE, WEIGHTS, RESUME from `load`

The launcher calls `choose_checkpoint` for each start, and its answer travels in the payload. Rank 0 calls it once more:
if the answer is another one by now, or the checkpoint is damaged, the ranks end before they change anything, and the
launcher decides again. Where no launcher follows, or it does not see the directories, rank 0's answer counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from neox.checkpoint_files.finding import names_of_checkpoints
from neox.config import Decided, Decision, NeoXConfig
from neox.plan import Precision
from neox.plan.run_identity import FoundRun, find_run, other_run_message
from neox.plan.run_start import FIRST_LOAD_KEYS, NEW_START, ChosenStart, RequestedStart, StartMode, requested_start
from neox.problems import Missing, Problem
from neox.storage import is_remote


@dataclass(frozen=True)
class StartFacts:
    """Runs in the directories of a configuration.

    Attributes:
        save: Run in `save`; None if it contains no checkpoint, or its checkpoints do not count (`overwrite`).
        of_save: The same at the step of `iteration`, if that means a step of `save`; else `save`.
        names: Names of the checkpoints in `save`.
        of_load: Run in another `load`, at the step of `iteration` if it is given; None if it contains no checkpoint, or
            is an address.
    """

    save: FoundRun | None = None
    of_save: FoundRun | None = None
    names: str = ""
    of_load: FoundRun | None = None


@dataclass(frozen=True)
class DecidedStart(Decided):
    """Decision about the start of a run.

    Attributes:
        start: The start.
        found: Run of its checkpoint; None for initial weights, or if this machine does not see it.
        none_complete: Whether the problem is that no checkpoint is complete.
    """

    start: ChosenStart = NEW_START
    found: FoundRun | None = None
    none_complete: bool = False

    @property
    def loaded(self) -> FoundRun | None:
        """Run that continues from its checkpoint; None if it begins."""
        if self.start.continues:
            return self.found
        return None

    @property
    def precision(self) -> Precision | None:
        """The precision of the checkpoint from which it continues; None without one."""
        if self.loaded is None:
            return None
        return self.loaded.precision


def choose_checkpoint(config: NeoXConfig, damaged: Collection[Path] = ()) -> DecidedStart:
    """Decide how a run starts, from its configuration and the directories that it names.

    Args:
        config: The configuration.
        damaged: Checkpoints that were found damaged.
    """
    return decide_checkpoint(config, find_facts(config, damaged), damaged)


def find_facts(config: NeoXConfig, damaged: Collection[Path] = ()) -> StartFacts:
    """Read which runs the directories of a configuration contain. Nothing is changed, and no weight is read."""
    asked = requested_start(config)
    own = None
    of_save = None
    names = ""
    if config.checkpoint.save is not None:
        save = Path(config.checkpoint.save)
        if not asked.replaces_save:
            own = find_run(save, without=damaged)
            of_save = own
            names = names_of_checkpoints(save)
        if own is not None and asked.iteration_of_save:
            of_save = find_run(save, asked.iteration, damaged)
    of_load = None
    if asked.load is not None and not is_remote(asked.load) and not asked.own_directory:
        of_load = find_run(Path(asked.load), asked.iteration, damaged)
    return StartFacts(own, of_save, names, of_load)


def decide_checkpoint(config: NeoXConfig, facts: StartFacts, damaged: Collection[Path] = ()) -> DecidedStart:
    """Decide how a run starts. Pure.

    Args:
        config: The configuration.
        facts: What its directories contain.
        damaged: Checkpoints that do not count.
    """
    asked = requested_start(config)
    excluded = tuple(sorted(map(str, damaged)))
    if asked.own_directory or facts.save is not None:
        return _from_save(config, asked, facts, excluded)
    if asked.iteration_of_save:
        return DecidedStart(problems=_no_such_step(config, asked))
    start = ChosenStart(replaces_save=asked.replaces_save, damaged=excluded)
    if asked.load is None:
        return DecidedStart(start=start)
    start = replace(start, mode=asked.mode, directory=asked.load)
    found = facts.of_load
    if found is None:  # missing here, or an address: other checks say so
        return DecidedStart(start=start)
    if found.incomplete:
        return DecidedStart(problems=(_incomplete_problem(config, found, "load"),), none_complete=True)
    if asked.replaces_save and _is_in(found.checkpoint, Path(str(config.checkpoint.save))):
        text = f"moves the checkpoints in `save` away, and `load` names one of them, {found.checkpoint}"
        problem = config.problem("overwrite", f"{text}; choose another `save`, or remove it", "load", "save")
        return DecidedStart(problems=(problem,))
    start = replace(start, checkpoint=str(found.checkpoint))
    if start.continues:
        start = replace(start, step=found.iteration)
    return DecidedStart(start=start, found=found)


def _from_save(config: NeoXConfig, asked: RequestedStart, facts: StartFacts, damaged: tuple[str, ...]) -> DecidedStart:
    """Decide about a run whose `save` contains checkpoints, or is what `load` names."""
    save = config.checkpoint.save
    found = facts.of_save
    if facts.save is None and asked.iteration_of_save:
        return DecidedStart(problems=_no_such_step(config, asked))
    if facts.save is None:  # the first start of a run that resumes its own directory
        return DecidedStart(start=ChosenStart(damaged=damaged))
    if not asked.own_directory and not facts.save.is_run_of(config):
        problem = config.problem_about(other_run_message(config, facts.save), "save")
        return DecidedStart(problems=(problem,))
    if found is None:
        rule = f"is not in {save}, which has {facts.names}"
        return DecidedStart(problems=(config.problem("iteration", rule, "save"),))
    if found.incomplete:
        return DecidedStart(problems=(_incomplete_problem(config, found, "save"),), none_complete=True)
    start = ChosenStart(asked.mode, save, str(found.checkpoint), found.iteration, own_directory=True, damaged=damaged)
    if asked.own_directory:
        return DecidedStart(start=start, found=found)
    decisions = tuple(_resume_decisions(config, asked, found))
    start = replace(start, mode=StartMode.RESUME)
    return DecidedStart(decisions, (decisions[0].reason,), start=start, found=found)


def _is_in(checkpoint: Path, save: Path) -> bool:
    """Return whether a checkpoint is one of those in `save`, also by a link."""
    return save.resolve() in (checkpoint.absolute().parent.resolve(), checkpoint.resolve().parent)


def _no_such_step(config: NeoXConfig, asked: RequestedStart) -> tuple[Problem, ...]:
    """Return the problem that `iteration` means a step of `save`, and no checkpoint there counts."""
    where = f"{config.checkpoint.save}, which has no checkpoint"
    if asked.replaces_save:
        where = f"{config.checkpoint.save}, whose checkpoints do not count with overwrite"
    problem = config.problem("iteration", f"is a step of {where}; remove it to start from the beginning", "save")
    if asked.replaces_save:
        return (problem,)
    return tuple(Missing.of([problem]))


def _incomplete_problem(config: NeoXConfig, found: FoundRun, key: str) -> Problem:
    """Return the problem that a directory contains checkpoints, and none is complete."""
    text = f"{found.checkpoint.parent} has no complete checkpoint: {'; '.join(found.incomplete)}"
    return config.problem_about(f"{text}. Restore one from a copy, or move them away", key)


def _resume_decisions(config: NeoXConfig, asked: RequestedStart, found: FoundRun) -> Iterator[Decision]:
    """Yield the settings that let the configuration name `save` as what is loaded."""
    dropped = [key for key in ("load", *FIRST_LOAD_KEYS) if config.given(key)]
    if asked.iteration_of_save:
        dropped.remove("iteration")
    reason = f"{config.checkpoint.save} holds this run at iteration {found.iteration}: it is resumed"
    if dropped:
        reason += f", so {', '.join(f'`{key}`' for key in dropped)} have no effect"
    yield Decision("load", config.checkpoint.save, reason, config.source("save").derived("load"))
    for key in dropped:
        if key != "load":
            yield Decision(key, None, reason, config.source(key))
