"""Check of `save` before a training starts: does it hold checkpoints, and are they of this run?"""

from __future__ import annotations

from pathlib import Path

from neox.config import NeoXConfig
from neox.plan import static_problems
from neox.plan.run_identity import (
    FoundRun,
    changed_keys,
    find_run,
    other_run_message,
    resumes_own_directory,
)
from neox.preflight.data_decisions import DecidedConfig

_MOST_CHANGES = 8


def with_own_run(config: NeoXConfig) -> DecidedConfig:
    """Let a run load its own checkpoints from `save`; those of another run are a problem."""
    keys = config.checkpoint
    if keys.save is None or keys.overwrite or static_problems(config):
        return DecidedConfig(config)
    found = find_run(Path(keys.save))
    if found is None:
        return DecidedConfig(config)
    if resumes_own_directory(config):
        return DecidedConfig(config, _changes(config, found))
    if not found.is_run_of(config):
        return DecidedConfig(config, problems=(config.problem_about(other_run_message(config, found), "save"),))
    note = f"{keys.save} holds this run at iteration {found.iteration}: it is resumed"
    dropped = [key for key in ("load", "finetune", "iteration") if config.given(key)]
    if dropped:
        note += f", so {', '.join(f'`{key}`' for key in dropped)} have no effect"
    source = config.source("save").derived("load")
    resumed = config.updated({"load": keys.save}, without=("finetune", "iteration"), source=source)
    return DecidedConfig(resumed, (note, *_changes(config, found)))


def _changes(config: NeoXConfig, found: FoundRun) -> tuple[str, ...]:
    """Return notes on a run that has nothing left to do, and on what differs from its checkpoint's configuration."""
    notes = []
    steps = config.training.train_iters
    if steps is not None and found.iteration >= steps:
        notes.append(f"{found.checkpoint} has all {steps} iterations: there is nothing left to train")
    changes = list(changed_keys(config, found))
    if changes:
        more = len(changes) - _MOST_CHANGES
        listed = "; ".join(changes[:_MOST_CHANGES]) + (f"; and {more} more" if more > 0 else "")
        notes.append(f"changed since {found.checkpoint.name}: {listed}")
    return tuple(notes)
