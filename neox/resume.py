"""Runs that continue after an interruption: a lock, a state file, and files that are cut to the state's size."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Generic, TypeVar

from neox.errors import DataError
from neox.files import lock_file, write_text
from neox.log import get_logger

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_log = get_logger(__name__)
SECONDS_BETWEEN_STATES = 5.0

S = TypeVar("S", bound="DataclassInstance")


class ResumeLog(Generic[S]):
    """State of an interrupted run: a dataclass in a JSON file, with the identity of the run."""

    def __init__(self, path: Path, run: str, from_json: Callable[[dict[str, Any]], S]) -> None:
        """Describe the file.

        Args:
            path: The JSON file.
            run: Identity of the run; the state of another run is ignored.
            from_json: Function from the state's fields to the state.
        """
        self.path = path
        self._run = run
        self._from_json = from_json
        self._written = float("-inf")  # the first state is due at once

    def read(self) -> S | None:
        """Return the state; None if there is none or, with a warning, if it is unreadable or of another run."""
        try:
            fields = json.loads(self.path.read_text(encoding="utf-8"))
            run = fields.pop("run")
            state = self._from_json(fields)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("%s cannot be read (%s): starting over", self.path, error)
            return None
        if run != self._run:
            _log.warning("%s is of an interrupted run with other inputs or settings: starting over", self.path)
            return None
        return state

    @property
    def is_due(self) -> bool:
        """Whether the last state was written so long ago that it is time for another."""
        return time.monotonic() - self._written > SECONDS_BETWEEN_STATES

    def write(self, state: S) -> None:
        """Replace the state atomically. The data that it describes must be on disk. Raises OSError."""
        write_text(self.path, json.dumps({"run": self._run, **asdict(state)}))
        self._written = time.monotonic()

    def remove(self) -> None:
        """Remove the file, if there is one."""
        self.path.unlink(missing_ok=True)


def open_truncated(path: Path, size: int) -> BinaryIO:
    """Open a file for appending after its first `size` bytes; what follows them is cut off.

    Raises:
        DataError: If the file has fewer bytes.
        OSError: If it cannot be opened.
    """
    have = path.stat().st_size if path.exists() else 0
    if have < size:
        raise DataError(f"{path} has {have} bytes, fewer than the {size} of the run to be continued; start it over")
    file: BinaryIO = open(path, "r+b" if have else "wb", buffering=1 << 20)  # noqa: SIM115 (closed by the caller)
    file.truncate(size)
    file.seek(size)
    return file


@contextmanager
def lock_output(output_prefix: str) -> Iterator[None]:
    """Lock the output for this process. Raises DataError if another run is writing it."""
    path = Path(f"{output_prefix}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115 (closed below; only errors of opening are caught)
    except OSError as error:
        raise DataError(f"{output_prefix} cannot be written: {error.strerror}") from error
    with file:
        if not _lock_soon(file):
            raise DataError(f"another run is writing {output_prefix}: wait for it, or choose another prefix")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock_soon(file: IO[Any]) -> bool:
    """Take the lock of an open file; return False if it stays taken. `is_output_locked` has it for a moment."""
    for seconds in (0.0, 0.05, 0.1, 0.2):
        time.sleep(seconds)
        try:
            lock_file(file, wait=False)
        except BlockingIOError:
            continue
        return True
    return False


def is_output_locked(output_prefix: str) -> bool:
    """Return whether a process holds the lock of an output; False if it cannot be told on this file system."""
    try:
        with open(f"{output_prefix}.lock", "r+") as file:
            lock_file(file, wait=False)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no lock, or one that cannot be opened
    return False
