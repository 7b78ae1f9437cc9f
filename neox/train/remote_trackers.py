"""Experiment trackers that send rows from a journal file in the background: MLflow, Comet and Trackio.

Training only appends each row to the journal. A thread connects, sends the rows in order, and records how many were
sent. If the tracker fails, the thread tries again. Rows that are still unsent at the end of the run are sent when the
run is resumed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from neox.errors import ConfigError, TrainingError, needs_package
from neox.files import write_text
from neox.log import get_logger
from neox.plan import RunPlan
from neox.train.callbacks import TrainState
from neox.train.trackers import Tracker, cut_partial_line, kept_run_id, run_settings, tracker_directory

_log = get_logger(__name__)
_ROWS_AT_ONCE = 200
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_SECONDS_TO_END = 20.0
_LONGEST_VALUE = 500
_LONGEST_NAME = 250


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

    def write(self, iteration: int, kind: str, scalars: Mapping[str, float]) -> None:
        """Append a row to the journal."""
        finite = {name: value if math.isfinite(value) else str(value) for name, value in scalars.items()}
        self._stream.write(json.dumps([iteration, time.time(), finite]) + "\n")
        self._stream.flush()
        self._written += 1

    def on_end(self, state: TrainState) -> None:
        """Wait a limited time until the last rows are sent."""
        self._end(failed=False)

    def on_failure(self, state: TrainState) -> None:
        """Mark the run as failed, if it was started."""
        self._end(failed=True)

    def _end(self, *, failed: bool) -> None:
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
            reason = _first_line(error)
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
            _log.warning("%s: the run could not be ended there: %s", self.name, _first_line(error))

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
                "%s: %s; training continues, and rows are kept in %s", self.name, _first_line(error), self.journal
            )
        self._failing = True

    def _note_success(self) -> None:
        if self._failing:
            _log.info("%s: reconnected; all rows are sent", self.name)
        self._failing = False


class MLflow(QueuedTracker):
    """MLflow run, at `mlflow_tracking_uri` or the environment's MLFLOW_TRACKING_URI.

    Raises:
        ConfigError: If mlflow is not installed.
    """

    name = "mlflow"
    _MOST_METRICS = 900
    _MOST_PARAMETERS = 100

    def __init__(self, plan: RunPlan, part: str = "") -> None:
        super().__init__(plan, part)
        with needs_package(ConfigError, "use_mlflow", "mlflow-skinny", "requirements-mlflow.txt"):
            import mlflow
        self._mlflow: Any = mlflow
        self._client: Any = None
        self._run = ""

    def connect(self, *, is_resumed: bool) -> None:
        """Find the run by its tag, or create it and log its settings as parameters."""
        keys = self.plan.config.logging
        client = self._mlflow.MlflowClient(tracking_uri=keys.mlflow_tracking_uri)
        experiment = client.get_experiment_by_name(keys.mlflow_experiment)
        number = experiment.experiment_id if experiment else client.create_experiment(keys.mlflow_experiment)
        # An attempt that broke off may have created the run, too.
        found = client.search_runs([number], f"tags.neox_run = '{self.run_id}'")
        if found:
            self._run = found[0].info.run_id
            client.update_run(self._run, status="RUNNING")
        else:
            created = client.create_run(number, tags={"neox_run": self.run_id}, run_name=keys.mlflow_run_name)
            self._run = created.info.run_id
        self._client = client
        known = found[0].data.params if found else {}
        parameters = []
        for key, value in run_settings(self.plan).items():
            if key not in known:  # MLflow refuses another value for a parameter
                parameters.append(self._mlflow.entities.Param(accepted_name(key), _short(value)))
        for start in range(0, len(parameters), self._MOST_PARAMETERS):
            self._log_parameters(parameters[start : start + self._MOST_PARAMETERS])

    def _log_parameters(self, parameters: list[Any]) -> None:
        """Log settings; those that the server refuses are left out."""
        try:
            self._client.log_batch(self._run, params=parameters)
        except Exception as error:  # of its own classes
            if not self.refuses(error):
                raise
            if len(parameters) == 1:
                _log.warning("mlflow refuses the setting %s: %s", parameters[0].key, _first_line(error))
                return
            half = len(parameters) // 2
            self._log_parameters(parameters[:half])
            self._log_parameters(parameters[half:])

    def refuses(self, error: Exception) -> bool:
        """Return whether MLflow refuses a name or a value; other errors may be temporary."""
        refused = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST")
        return getattr(error, "error_code", "") in refused or super().refuses(error)

    def send(self, rows: list[Row]) -> None:
        """Log metrics in batches of the size that the server accepts."""
        metrics = []
        for row in rows:
            for name, value in row.scalars.items():
                time_ms = int(row.seconds * 1000)
                metrics.append(self._mlflow.entities.Metric(accepted_name(name), value, time_ms, row.iteration))
        for start in range(0, len(metrics), self._MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + self._MOST_METRICS])

    def close(self, *, failed: bool) -> None:
        """Set the state of the run."""
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def accepted_name(name: str) -> str:
    """Return a name that every MLflow server accepts: the same one each time, and another one for another name.

    Servers accept letters, digits, `_`, `-`, `.`, `/` and blanks, in what is a path in its shortest form. In other
    names the characters become `_`, and four digits of a hash of the name are added. Names end after 250 characters.
    """
    accepted = re.sub(r"[^/\w.\- ]", "_", name)
    parts = [part for part in accepted.split("/") if part.strip(". ")]
    accepted = "/".join(parts)
    if accepted == name and len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:4]
    return f"{accepted[: _LONGEST_NAME - 5]}-{digest}"


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
        settings = self._comet.ExperimentConfig(
            name=keys.comet_experiment_name,
            tags=list(keys.comet_tags or ()) or None,
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
        config = {key: _short(value) for key, value in run_settings(self.plan).items()}
        self._run = self._trackio.init(
            project=keys.trackio_project,
            name=keys.trackio_run_name or self.run_id,
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


def queued_trackers(plan: RunPlan, part: str = "") -> list[QueuedTracker]:
    """Return the trackers of this file that a run enables. Raises ConfigError if a package is not installed."""
    keys = plan.config.logging
    trackers: list[QueuedTracker] = []
    if keys.use_mlflow:
        trackers.append(MLflow(plan, part))
    if keys.use_comet:
        trackers.append(Comet(plan, part))
    if keys.use_trackio:
        trackers.append(Trackio(plan, part))
    return trackers


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _short(value: Any) -> str:
    """Return a setting as text, cut to a length that trackers accept."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text[:_LONGEST_VALUE]
