"""Checks of `save` before a training: whether it has checkpoints, whether of this run, and whether it has finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neox.checkpoint_files.contents import why_incomplete
from neox.config import NeoXConfig
from neox.launch.supervisor.outcome import EndKind
from neox.metrics import METRICS_FILE, last_evaluation_is_missing
from neox.plan import RunPlan, static_problems
from neox.plan.run_identity import (
    FIRST_LOAD_KEYS,
    FoundRun,
    all_changes,
    changed_keys,
    find_run,
    other_run_message,
    resumes_own_directory,
)
from neox.plan.schedule import schedule_of
from neox.preflight.data_decisions import DecidedConfig
from neox.preflight.saved_schedule import with_saved_schedule, with_saved_warmup
from neox.run_events import read_events
from neox.storage import is_remote

_MOST_CHANGES = 8
_JUMP = 0.05  # share of the learning rate
_EPOCHS = "num_train_epochs"


@dataclass(frozen=True)
class ResumedConfig(DecidedConfig):
    """The configuration of a training, with settings that the checkpoint that it resumes decides.

    Attributes:
        loaded: The run of that checkpoint; None if the training begins anew, or the checkpoint is not on this machine.
    """

    loaded: FoundRun | None = None


def resume_from_save(config: NeoXConfig) -> ResumedConfig:
    """Let a run resume from its own checkpoints in `save`; those of another run are a problem.

    The schedule of the checkpoint that is loaded replaces the configuration's if `use_checkpoint_lr_scheduler` is set.
    """
    if static_problems(config):
        return ResumedConfig(config)
    keys = config.checkpoint
    found = None
    if keys.save is not None and not keys.overwrite:
        found = find_run(Path(keys.save))
    if found is None:
        scheduled = _with_schedule_of_checkpoint(config)
        return ResumedConfig(scheduled.config, scheduled.notes, scheduled.problems, _loaded(config, None))

    resumed = config
    notes: tuple[str, ...] = ()
    if not resumes_own_directory(config):
        if not found.is_run_of(config):
            return ResumedConfig(config, problems=(config.problem_about(other_run_message(config, found), "save"),))
        note = f"{keys.save} holds this run at iteration {found.iteration}: it is resumed"
        dropped = [key for key in ("load", *FIRST_LOAD_KEYS) if config.given(key)]
        if dropped:
            note += f", so {', '.join(f'`{key}`' for key in dropped)} have no effect"
        notes = (note,)
        source = config.source("save").derived("load")
        resumed = config.updated({"load": keys.save}, without=FIRST_LOAD_KEYS, source=source)

    loaded = _loaded(resumed, found)
    scheduled = _with_schedule_of_checkpoint(resumed)
    notes += scheduled.notes
    if loaded is not None:
        notes += _changes_since(loaded, scheduled.config)
    return ResumedConfig(scheduled.config, notes, scheduled.problems, loaded)


def _loaded(config: NeoXConfig, own: FoundRun | None) -> FoundRun | None:
    """Return the run of the checkpoint that a training resumes; None if there is none on this machine.

    Args:
        config: The configuration of the training.
        own: The run in `save`, if `load` is the same directory.
    """
    keys = config.checkpoint
    if keys.load is None or keys.finetune or is_remote(keys.load):
        return None
    if own is not None and keys.iteration is None:
        return own
    return find_run(Path(keys.load), keys.iteration)


def _with_schedule_of_checkpoint(config: NeoXConfig) -> DecidedConfig:
    """Let a run continue the schedule of the checkpoint that it loads, or at least its warm-up."""
    scheduled = with_saved_schedule(config)
    if scheduled.problems or config.schedule.use_checkpoint_lr_scheduler or static_problems(scheduled.config):
        return scheduled
    kept = with_saved_warmup(scheduled.config)
    return DecidedConfig(kept.config, (*scheduled.notes, *kept.notes))


def with_warmup_of_counted(config: NeoXConfig) -> DecidedConfig:
    """Let a run whose length was counted in its data continue its warm-up (`resume_from_save` knew no length)."""
    is_counted = config.source("train_iters").rule == _EPOCHS
    if not is_counted or config.schedule.use_checkpoint_lr_scheduler or static_problems(config):
        return DecidedConfig(config)
    return with_saved_warmup(config)


def _changes_since(loaded: FoundRun, config: NeoXConfig) -> tuple[str, ...]:
    """Return notes on a run that has nothing left to do, and on what differs from its checkpoint's configuration."""
    notes = []
    steps = config.training.train_iters
    if steps is not None and loaded.iteration >= steps:
        notes.append(f"{loaded.checkpoint} has all {steps} iterations: there is nothing left to train")
    changes = list(changed_keys(config, loaded))
    if not changes:
        return tuple(notes)
    notes.append(f"changed since {loaded.checkpoint.name}: {_listed(changes)}")
    saved = loaded.saved_config
    if saved is not None and not static_problems(saved) and steps is not None:
        before = schedule_of(saved).lr(loaded.iteration)
        now = schedule_of(config).lr(loaded.iteration)
        if abs(now - before) > _JUMP * max(abs(now), abs(before)):
            notes.append(
                f"the learning rate of the next step is {now:.3g}; the schedule of {loaded.checkpoint.name} gives "
                f"{before:.3g} there"
            )
    return tuple(notes)


def _listed(changes: Sequence[str]) -> str:
    """Return the first changes in a line."""
    listed = "; ".join(changes[:_MOST_CHANGES])
    if len(changes) > _MOST_CHANGES:
        listed += f"; and {len(changes) - _MOST_CHANGES} more"
    return listed


def batch_note(plan: RunPlan, loaded: FoundRun | None) -> str | None:
    """Return a note on a run whose steps have other samples than those of the checkpoint it resumes; None if the same.

    Without `train_batch_size` they follow from the degrees, so that they are known only now. If it was given before and
    is given now, it is among the keys that have changed.

    Args:
        plan: The plan of the run.
        loaded: The run of the checkpoint that it resumes (`ResumedConfig.loaded`).
    """
    now = plan.batch.train_batch_size
    if loaded is None or loaded.samples_per_step in (None, now):
        return None
    return (
        f"changed since {loaded.checkpoint.name}: samples of a step {loaded.samples_per_step} -> {now}; "
        f"`train_batch_size: {loaded.samples_per_step}` keeps them"
    )


def finished_note(config: NeoXConfig, directory: Path) -> str | None:
    """Return a note that a run has finished, and how to continue it; None if something is left to do.

    A finished run is started again if its last start was interrupted (evaluations after the last step may be missing),
    if its metrics lack the last evaluation, or if it sends checkpoints or metrics elsewhere, because some of them may
    be unsent.

    Args:
        config: The configuration, which loads the run's own checkpoints (`resume_from_save`).
        directory: The run directory.
    """
    keys = config.checkpoint
    steps = config.training.train_iters
    if keys.save is None or keys.overwrite or not steps or not resumes_own_directory(config):
        return None
    found = find_run(Path(keys.save))
    if found is None or found.iteration < steps or keys.iteration not in (None, found.iteration):
        return None
    logging = config.logging
    if keys.checkpoint_mirror is not None or logging.use_mlflow or logging.use_comet or logging.use_trackio:
        return None
    if not _ended_by_itself(directory) or lacks_last_evaluation(directory, is_evaluated=evaluates(config)):
        return None
    if why_incomplete(found.checkpoint, hashes=False):
        return None
    key = _EPOCHS if config.source("train_iters").rule == _EPOCHS else "train_iters"
    note = f"{found.checkpoint}: this run has finished with {found.iteration:,} steps; nothing was started"
    changes = list(all_changes(config, found))
    if changes:
        note += f", and what has changed since then had no effect ({_listed(changes)})"
    return f"{note}. To continue it, set a larger `{key}` (--set {key}=N); to start from the beginning, add --overwrite"


def unfinished_note(config: NeoXConfig, directory: Path) -> str | None:
    """Return how to continue a run that ended before its last step or evaluation.

    None if it has both, or no checkpoint.

    Args:
        config: The configuration of the run that has ended.
        directory: The run directory.
    """
    keys = config.checkpoint
    steps = config.training.train_iters
    if keys.save is None or steps is None:
        return None
    found = find_run(Path(keys.save))
    if found is None:
        return None
    is_trained = found.iteration >= steps
    if is_trained and not lacks_last_evaluation(directory, is_evaluated=evaluates(config)):
        return None
    command = "run the same command again"
    if keys.overwrite:
        command += " without --overwrite"
    if is_trained:
        return f"{found.checkpoint} has all {steps:,} steps, but no evaluation after the last; for it, {command}"
    return f"{found.checkpoint} has {found.iteration:,} of {steps:,} steps; to continue from there, {command}"


def evaluates(config: NeoXConfig) -> bool:
    """Return whether a run is evaluated on validation data."""
    return config.training.eval_iters != 0


def lacks_last_evaluation(directory: Path, *, is_evaluated: bool) -> bool:
    """Return whether the metrics of a run have evaluations on validation data, but none after the last step.

    Args:
        directory: The run directory.
        is_evaluated: Whether the run is evaluated. One that is not lacks nothing.
    """
    metrics = directory / METRICS_FILE
    if not is_evaluated or not metrics.exists():
        return False
    return last_evaluation_is_missing(metrics)


def _ended_by_itself(directory: Path) -> bool:
    """Return whether the last recorded start of a run ended with status 0, unasked; True if none is recorded.

    A run that a signal asks to end skips evaluations, and has status 0, too.
    """
    ended_by_itself = True
    for event in read_events(directory):
        if event["event"] == "start":
            ended_by_itself = False
        elif event["event"] == "end":
            is_asked = event.get("kind") in (EndKind.ASKED.value, EndKind.PREEMPTED.value)
            ended_by_itself = event.get("status") == 0 and not is_asked
    return ended_by_itself
