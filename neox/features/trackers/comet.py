"""Comet (`use_comet`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neox.errors import ConfigError, needs_package
from neox.features.trackers.journal import QueuedTracker, Row
from neox.features.trackers.tracker import run_settings
from neox.log import get_logger
from neox.plan import RunPlan

_log = get_logger(__name__)


def build(plan: RunPlan, rank: int) -> Comet | None:
    """Return the tracker of rank 0; None if it is not configured."""
    if rank != 0 or not plan.config.logging.use_comet:
        return None
    return Comet(plan)


class Comet(QueuedTracker):
    """Comet experiment, with gpt-neox's keys. With `comet_offline_directory` it is written to disk for `comet upload`.

    Raises:
        ConfigError: If comet_ml is not installed.
    """

    name = "comet"

    def __init__(self, plan: RunPlan, part: str = "") -> None:
        super().__init__(plan, part)
        with needs_package(ConfigError, "use_comet", "comet_ml", "requirements-comet.txt"):
            import comet_ml
        self._comet: Any = comet_ml
        self._experiment: Any = None

    def connect(self, *, is_resumed: bool) -> None:
        """Start the experiment, or resume the one with this run's key."""
        keys = self.plan.config.logging
        offline = keys.comet_offline_directory
        if offline is not None:
            Path(offline).mkdir(parents=True, exist_ok=True)
        tags = list(keys.comet_tags or ())
        if keys.tracker_group is not None:
            tags.append(keys.tracker_group)
        settings = self._comet.ExperimentConfig(
            name=keys.comet_experiment_name,
            tags=tags or None,
            offline_directory=offline,
            log_code=False,
            auto_output_logging=False,
            auto_metric_logging=False,
            auto_param_logging=False,
            display_summary_level=0,
        )
        self._experiment = self._comet.start(
            workspace=keys.comet_workspace,
            project_name=keys.comet_project,
            online=offline is None,
            mode="get_or_create" if offline is None else "create",
            experiment_key=self.run_id.ljust(32, "0") if offline is None else None,
            experiment_config=settings,
        )
        self._experiment.log_parameters(run_settings(self.plan))
        if keys.comet_others:
            self._experiment.log_others(dict(keys.comet_others))

    def send(self, rows: list[Row]) -> None:
        """Log the scalars of each row."""
        for row in rows:
            self._experiment.log_metrics(row.scalars, step=row.iteration)

    def close(self, *, failed: bool) -> None:
        """End the experiment, which flushes the package's own queue."""
        self._experiment.log_other("failed", failed)
        self._experiment.end()
