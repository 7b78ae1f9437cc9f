"""Base class of trackers that send rows from a journal file in the background: MLflow, Comet and Trackio.

Training only appends each row to the journal. A thread connects, sends the rows in order, and records how many were
sent. If the tracker fails, the thread tries again. Rows that are still unsent at the end of the run are sent when the
run is resumed.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from neox.engine import TrainState
from neox.errors import TrainingError
from neox.features.trackers.tracker import Tracker, counted, cut_partial_line, kept_run_id, tracker_directory
from neox.files import write_text
from neox.log import get_logger
from neox.plan import RunPlan

_log = get_logger(__name__)
_ROWS_AT_ONCE = 200
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_SECONDS_TO_END = 20.0
_LONGEST_VALUE = 500


class Row(NamedTuple):
    """Row of the journal.

    Attributes:
        iteration: Iteration of the scalars.
        seconds: Unix time at which the row was written.
        scalars: Values by name.
    """

    iteration: int
    seconds: float
    scalars: dict[str, float]


class QueuedTracker(Tracker):
    """Tracker with a journal. Subclasses implement `connect`, `send` and `close`, which only one thread calls.

    A scalar that the tracker refuses is left out, with one warning for its name; the others arrive.
    """

    name = ""
    """Name in messages and file names."""

    def __init__(self, plan: RunPlan, part: str = "") -> None:
        """Set up the tracker without connecting.

        Args:
            plan: The run.
            part: Name of another process that logs to the same run, such as `evaluation`; it has its own journal. Empty
                for the training.
        """
        self.plan = plan
        self.part = part
        self.directory = tracker_directory(plan)
        stem = f"{self.name}_{part}" if part else self.name
        self.journal = self.directory / f"{stem}_rows.jsonl"
        self.sent_file = self.directory / f"{stem}_sent"
        self.run_id = ""
        self._sent = 0  # rows
        self._written = 0
        self._failing = False
        self._refused: set[str] = set()  # names of scalars
        self._ending = threading.Event()
        self._exit_failed = False
        self._thread: threading.Thread | None = None

    @abstractmethod
    def connect(self, *, is_resumed: bool) -> None:
        """Start or resume the run at the tracker. After any exception it is called again later."""

    @abstractmethod
    def send(self, rows: list[Row]) -> None:
        """Send rows, oldest first. After any exception it is called again later with the same rows."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """End the run at the tracker."""

    def refuses(self, error: Exception) -> bool:
        """Return whether an error of `send` is about a name or a value, so that another attempt cannot succeed."""
        return isinstance(error, TypeError | ValueError)

    def on_start(self, state: TrainState) -> None:
        """Open the journal, which may hold unsent rows of an interrupted training, and start the thread.

        Raises:
            TrainingError: If the journal cannot be written.
        """
        resumed = state.iteration > 0 or bool(self.part)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.run_id = kept_run_id(self.directory / f"{self.name}_run_id", resumed=resumed)
            if not resumed:
                self._forget_earlier_run()
            if self.journal.is_file():
                cut_partial_line(self.journal)
            self._sent = 0
            if self.sent_file.is_file():
                self._sent = int(self.sent_file.read_text() or 0)
            self._written = sum(1 for _ in self._rows(0))
            self._stream = open(self.journal, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        except (OSError, ValueError) as error:
            raise TrainingError(f"{self.journal} cannot be written or read: {error}") from error
        if self._written > self._sent:
            _log.info("%s: sending %d unsent rows of the interrupted run", self.name, self._written - self._sent)
        self._thread = threading.Thread(target=self._serve, args=(resumed,), daemon=True, name=self.name)
        self._thread.start()

    def _forget_earlier_run(self) -> None:
        """Start with an empty journal. If an earlier run has left unsent rows, keep its journal under another name."""
        if self.journal.is_file():
            kept = self.journal.with_name(f"{self.journal.stem}_unsent_{secrets.token_hex(2)}.jsonl")
            self.journal.rename(kept)
            _log.warning("%s: an earlier run left rows that were not sent; they are now in %s", self.name, kept)
        self.sent_file.unlink(missing_ok=True)

    def write(self, iteration: int, kind: str, scalars: Mapping[str, float | None]) -> None:
        """Append a row to the journal."""
        finite = {name: value if math.isfinite(value) else str(value) for name, value in counted(scalars).items()}
        self._stream.write(json.dumps([iteration, time.time(), finite]) + "\n")
        self._stream.flush()
        self._written += 1

    def end(self, *, failed: bool) -> None:
        """Wait a limited time until the last rows are sent, if the run was started."""
        if self._thread is None:
            return
        self._exit_failed = failed
        self._ending.set()
        self._thread.join(_SECONDS_TO_END)
        self._stream.close()
        left = self._written - self._sent
        if left or self._thread.is_alive():
            _log.warning("%s: %d rows in %s are unsent; a resumed run sends them", self.name, left, self.journal)
            return
        self.journal.unlink(missing_ok=True)
        self.sent_file.unlink(missing_ok=True)

    def _serve(self, resumed: bool) -> None:
        """Connect, and send rows until the run has ended and all rows are sent, or a last attempt has failed."""
        pause = _FIRST_PAUSE
        connected = False
        while True:
            ends = self._ending.is_set()  # read before sending, so that the last pass sends every row
            try:
                if not connected:
                    self.connect(is_resumed=resumed)
                    connected = True
                self._send_all()
                if ends:
                    self.close(failed=self._exit_failed)
                    return
                self._note_success()
                pause = _FIRST_PAUSE
                self._ending.wait(_FIRST_PAUSE)
            except Exception as error:  # the tracker's package may raise anything
                self._note_failure(error)
                if ends:
                    if connected:
                        self._close_with_rows_left()
                    return
                self._ending.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _send_all(self) -> None:
        while self._sent < self._written:
            rows = []
            for row in self._rows(self._sent):
                rows.append(row)
                if len(rows) == _ROWS_AT_ONCE:
                    break
            self._send_what_is_accepted(rows)
            self._sent += len(rows)
            write_text(self.sent_file, str(self._sent))

    def _send_what_is_accepted(self, rows: list[Row]) -> None:
        """Send rows; if the tracker refuses one, send the others, and of that one the scalars that it accepts."""
        rows = [self._without_refused(row) for row in rows]
        try:
            self.send(rows)
            return
        except Exception as error:  # the tracker's package may raise anything
            if not self.refuses(error):
                raise
            reason = first_line(error)
        if len(rows) > 1:
            half = len(rows) // 2
            self._send_what_is_accepted(rows[:half])
            self._send_what_is_accepted(rows[half:])
            return
        (row,) = rows
        if len(row.scalars) > 1:
            for name, value in row.scalars.items():
                self._send_what_is_accepted([row._replace(scalars={name: value})])
            return
        for name in row.scalars:
            self._refused.add(name)
            _log.warning("%s refuses %r (%s); it is left out, and the other scalars are sent", self.name, name, reason)

    def _without_refused(self, row: Row) -> Row:
        """Return a row without the scalars that the tracker has refused."""
        return row._replace(scalars={name: value for name, value in row.scalars.items() if name not in self._refused})

    def _close_with_rows_left(self) -> None:
        """End the run at the tracker although rows are unsent, so that it does not stay a running one there."""
        try:
            self.close(failed=self._exit_failed)
        except Exception as error:  # as above; the server is away
            _log.warning("%s: the run could not be ended there: %s", self.name, first_line(error))

    def _rows(self, first: int) -> Iterator[Row]:
        """Yield the rows of the journal, starting at row `first`."""
        if not self.journal.is_file():
            return
        with open(self.journal, encoding="utf-8") as file:
            for number, line in enumerate(file):
                if number < first:
                    continue
                iteration, seconds, scalars = json.loads(line)
                yield Row(iteration, seconds, {name: float(value) for name, value in scalars.items()})

    def _note_failure(self, error: Exception) -> None:
        if not self._failing:
            _log.warning(
                "%s: %s; training continues, and rows are kept in %s", self.name, first_line(error), self.journal
            )
        self._failing = True

    def _note_success(self) -> None:
        if self._failing:
            _log.info("%s: reconnected; all rows are sent", self.name)
        self._failing = False


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def short(value: Any) -> str:
    """Return a setting as text, cut to a length that trackers accept."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text[:_LONGEST_VALUE]
