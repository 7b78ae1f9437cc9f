"""Weights & Biases (`use_wandb`)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neox.engine import TrainState
from neox.errors import ConfigError, TrainingError, install_command
from neox.features.trackers.tracker import Tracker, counted, run_settings, tracker_directory
from neox.log import get_logger
from neox.plan import RunPlan

_log = get_logger(__name__)
WANDB_RUN_ID_FILE = "wandb_run_id"
"""File in the run directory with the id of the wandb run that a resumed training continues."""


def build(plan: RunPlan, rank: int) -> WandB | None:
    """Return the tracker of rank 0; None if it is not configured."""
    if rank != 0 or not plan.config.logging.use_wandb:
        return None
    return WandB(plan)


class WandB(Tracker):
    """Weights & Biases run (`WANDB_MODE=offline` keeps it on disk).

    The run's id is kept in `log_dir` (else `save`), so that a resumed training continues the same run. Offline, each
    start has an id of its own, because a sync of two starts with one id keeps only the later one's rows. They are in
    one group: `wandb_group`, or the id of the first start. Charts count in `iteration`: wandb's own step never goes
    back, which a resume from an earlier checkpoint does.

    Raises:
        ConfigError: If wandb is not installed.
    """

    def __init__(self, plan: RunPlan) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"use_wandb is true, but wandb is not installed ({error}): "
                f"{install_command('requirements-wandb.txt')}, or set use_wandb to false"
            ) from error
        self._wandb: Any = wandb
        self._plan = plan
        self._run: Any = None

    def on_start(self, state: TrainState) -> None:
        """Begin a run, or continue the one of the training that is resumed.

        Raises:
            TrainingError: If the run's id cannot be kept, or wandb cannot start.
        """
        keys = self._plan.config.logging
        wandb = self._wandb
        directory = tracker_directory(self._plan)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            offline = wandb.setup().settings.mode in ("offline", "dryrun")
            file = directory / WANDB_RUN_ID_FILE
            run_id, group = self._id_and_group(file, resumed=state.iteration > 0, offline=offline)
        except OSError as error:
            raise TrainingError(f"{directory}: the id of wandb's run cannot be kept: {error.strerror}") from error
        try:
            self._run = wandb.init(
                project=keys.wandb_project,
                group=group,
                name=keys.wandb_run_name,
                entity=keys.wandb_team,
                config=run_settings(self._plan),
                dir=directory,
                id=run_id,
                resume="allow",
                settings=wandb.Settings(base_url=keys.wandb_host),
            )
        except wandb.errors.Error as error:
            raise TrainingError(
                f"wandb could not start ({error}); log in, set WANDB_MODE=offline, or unset use_wandb"
            ) from error
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def _id_and_group(self, file: Path, *, resumed: bool, offline: bool) -> tuple[str, str | None]:
        """Return the id of this start's run, and its group.

        Args:
            file: File with the id of the last start; after an offline one also the word `offline` and the group.
            resumed: Whether the training is resumed.
            offline: Whether this start only writes to disk.
        """
        keys = self._plan.config.logging
        group = keys.wandb_group or keys.tracker_group
        last_id, last_group = None, None
        if resumed and file.is_file():
            last_id, last_group = _id_and_group_of(file.read_text())
        if last_id is not None and last_group is None and not offline:
            return last_id, group
        run_id = secrets.token_hex(4)
        if last_id is None and not offline:
            file.write_text(f"{run_id}\n")
            return run_id, group
        # Starts before and after this one cannot continue one run, so a group contains them: that of the first one.
        together = group or last_group or last_id or run_id
        if last_id is not None:
            _log.info("wandb: this start is the run %s, in the group %s with those before it", run_id, together)
        file.write_text(f"{run_id} offline {together}\n" if offline else f"{run_id}\n")
        return run_id, together

    def write(self, iteration: int, kind: str, scalars: Mapping[str, float | None]) -> None:
        """Log one row."""
        self._run.log({"iteration": iteration, **counted(scalars)})

    def end(self, *, failed: bool) -> None:
        """Finish the run, if it has begun, and wandb's own process."""
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=int(failed))
        finally:
            self._wandb.teardown()


def _id_and_group_of(text: str) -> tuple[str | None, str | None]:
    """Return the id and the group that a start has written: `ID`, or `ID offline GROUP`; None for what is not there."""
    words = text.split()
    if not words:
        return None, None
    return words[0], words[2] if len(words) > 2 else None
