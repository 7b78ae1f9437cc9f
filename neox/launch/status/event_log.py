"""Recording of a run's events by the launcher and by ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from neox.log import get_logger
from neox.run_events import EVENTS_FILE, append_event

RUN_DIRECTORY_VARIABLE = "NEOX_RUN_DIRECTORY"
"""Environment variable of ranks with the path of the run directory."""
_log = get_logger(__name__)


def record_event(directory: Path, event: str, **fields: Any) -> None:
    """Append an event to the event log of a run. If it cannot be written, only warn.

    Args:
        directory: The run directory.
        event: Name of the event, one or two words.
        fields: Further fields of the line.
    """
    try:
        append_event(directory, event, **fields)
    except OSError as error:
        _log.warning("%s cannot be written (%s): %s %s", directory / EVENTS_FILE, error.strerror, event, fields)


def record_run_event(event: str, **fields: Any) -> None:
    """Record an event that all ranks report; only rank 0 writes it. Without a launcher nothing is written.

    Args:
        event: Name of the event, one or two words.
        fields: Further fields of the line.
    """
    directory = os.environ.get(RUN_DIRECTORY_VARIABLE)
    if directory and os.environ.get("RANK") == "0":
        record_event(Path(directory), event, **fields)
