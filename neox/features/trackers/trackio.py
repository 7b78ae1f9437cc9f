"""Trackio (`use_trackio`)."""

from __future__ import annotations

from typing import Any

from neox.errors import ConfigError, needs_package
from neox.features.trackers.journal import QueuedTracker, Row, short
from neox.features.trackers.tracker import run_settings
from neox.log import get_logger
from neox.plan import RunPlan

_log = get_logger(__name__)


def build(plan: RunPlan, rank: int) -> Trackio | None:
    """Return the tracker of rank 0; None if it is not configured."""
    if rank != 0 or not plan.config.logging.use_trackio:
        return None
    return Trackio(plan)


class Trackio(QueuedTracker):
    """Trackio run, on this machine or in a Space on the Hugging Face Hub (`trackio_space_id`).

    Raises:
        ConfigError: If trackio is not installed.
    """

    name = "trackio"

    def __init__(self, plan: RunPlan, part: str = "") -> None:
        super().__init__(plan, part)
        with needs_package(ConfigError, "use_trackio", "trackio", "requirements-trackio.txt"):
            import trackio
        self._trackio: Any = trackio
        self._run: Any = None

    def connect(self, *, is_resumed: bool) -> None:
        """Start the run, or resume the one with this name."""
        keys = self.plan.config.logging
        config = {key: short(value) for key, value in run_settings(self.plan).items()}
        self._run = self._trackio.init(
            project=keys.trackio_project,
            name=keys.trackio_run_name or self.run_id,
            group=keys.tracker_group,
            space_id=keys.trackio_space_id,
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def send(self, rows: list[Row]) -> None:
        """Log the scalars of each row."""
        for row in rows:
            self._run.log({"iteration": row.iteration, **row.scalars}, step=row.iteration)

    def close(self, *, failed: bool) -> None:
        """Finish the run."""
        self._run.finish()
