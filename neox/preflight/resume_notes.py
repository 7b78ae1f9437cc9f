"""Notes on a training that continues: what has changed, whether it has finished, and how to continue it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from neox.config import NeoXConfig
from neox.launch.supervisor.outcome import EndKind
from neox.metrics import METRICS_FILE, last_evaluation_is_missing
from neox.plan import RunPlan, static_problems
from neox.plan.run_identity import FoundRun, all_changes, changed_keys, find_run
from neox.plan.run_start import requested_start
from neox.plan.schedule import schedule_of
from neox.run_events import read_events

_MOST_CHANGES = 8
_JUMP = 0.05  # share of the learning rate
_EPOCHS = "num_train_epochs"


def changes_since(loaded: FoundRun, config: NeoXConfig) -> tuple[str, ...]:
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
        loaded: The run of the checkpoint from which it continues.
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
        config: The configuration, which loads the run's own checkpoints.
        directory: The run directory.
    """
    keys = config.checkpoint
    steps = config.training.train_iters
    if keys.save is None or not steps or not requested_start(config).own_directory:
        return None
    found = find_run(Path(keys.save), keys.iteration)
    if found is None or found.iteration < steps or found.incomplete:
        return None
    logging = config.logging
    if keys.checkpoint_mirror is not None or logging.use_mlflow or logging.use_comet or logging.use_trackio:
        return None
    if not _ended_by_itself(directory) or lacks_last_evaluation(directory, is_evaluated=evaluates(config)):
        return None
    key = _EPOCHS if config.source("train_iters").decided else "train_iters"  # it was counted
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
    if requested_start(config).replaces_save:
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
