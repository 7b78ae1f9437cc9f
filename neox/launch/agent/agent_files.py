"""Files by which a host's agent, its ranks and the launcher's remote commands exchange state.

They are in a private temporary directory: the agent's process id and start time, a file by which ranks report
progress, their answers to signals, and why they have failed. Secrets wait next to that directory until the agent reads
them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neox.errors import LaunchError
from neox.files import read_json_object, write_text
from neox.launch.processes import is_alive, process_start

PROGRESS_VARIABLE = "NEOX_PROGRESS_FILE"
LAUNCHER_VARIABLE = "NEOX_LAUNCHER"
"""Environment variable of ranks whose start a launcher follows; it is not set with `launcher: none` or torchrun."""
HOST_VARIABLE = "NEOX_HOST"
"""Environment variable of ranks with the name of their host in the hostfile."""
INTERRUPT_RANKS = signal.SIGUSR2
"""Signal at which an agent sends SIGINT to its ranks. Their script handles it and continues."""
STOP_RANKS = signal.SIGALRM
"""Signal at which an agent does the same as at SIGTERM. mpirun passes it on; at SIGTERM it soon kills the agents."""
ANSWER_SECONDS = 5.0
"""Time in which a rank must answer a signal. After twice that time all processes have ended, even on a busy machine."""
_OLD_SECONDS = 3600
_STEP_DIGITS = 12  # in the file of progress


# -- what ranks report


class Cause:
    """Causes of failures that affect the decision about a restart."""

    REFUSED = "refused"  # a configuration that no rank can run
    DISK_FULL = "disk full"
    STALE_START = "stale start"  # the checkpoint that the launcher chose is damaged, or another one counts by now
    NO_CHECKPOINT = "no checkpoint"  # all checkpoints to resume from are damaged
    NOT_FINITE = "not finite"  # a loss or a gradient norm
    REPLICAS = "replicas differ"  # data ranks hold different weights


@dataclass(frozen=True)
class FailureReport:
    """Failure report of a rank.

    Attributes:
        cause: A value in `Cause`.
        step: Number of completed steps; None if unknown.
        ranks: Ranks at fault, if known.
        checkpoint: Path of a damaged checkpoint, if that is the cause.
    """

    cause: str
    step: int | None = None
    ranks: tuple[int, ...] = ()
    checkpoint: str | None = None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> FailureReport:
        """Return the report with fields from JSON. Raises KeyError or TypeError if it is none."""
        return cls(fields["cause"], fields["step"], tuple(fields["ranks"]), fields.get("checkpoint"))


# -- the directory


def agent_directory(run_id: str, node_rank: int) -> Path:
    """Return the path of an agent's directory. Each start has its own."""
    return _user_directory() / f"{run_id}.{node_rank}"


def create_agent_directory(run_id: str, node_rank: int) -> Path:
    """Create the directory of this process, an agent, with its process id and start time in it."""
    directory = agent_directory(run_id, node_rank)
    _remove_old_entries(directory.parent)
    directory.mkdir(mode=0o700)
    write_text(directory / "pid", f"{os.getpid()} {process_start(os.getpid())}")
    return directory


def agent_pid(directory: Path) -> int | None:
    """Return the process id of a directory's agent; None if it has ended, even if another process has its id now."""
    try:
        pid, _, start = (directory / "pid").read_text().partition(" ")
    except FileNotFoundError:
        return None
    is_same = not start or process_start(int(pid)) == start  # earlier versions did not write the time
    return int(pid) if is_same and is_alive(int(pid)) else None


def _remove_old_entries(user_directory: Path) -> None:
    """Remove files, and directories of dead agents, that are over an hour old."""
    for entry in user_directory.iterdir():
        with suppress(OSError, ValueError):
            if time.time() - entry.lstat().st_mtime < _OLD_SECONDS:
                continue
            if entry.is_file():
                entry.unlink()
            elif agent_pid(entry) is None:
                shutil.rmtree(entry)


def secrets_file(run_id: str, node_rank: int) -> Path:
    """Return the path of the file that holds secrets until the agent has read them."""
    return agent_directory(run_id, node_rank).with_suffix(f".{node_rank}.secrets")


def take_secrets(run_id: str, node_rank: int) -> dict[str, str]:
    """Return the secrets that were stored on this host, and remove their file."""
    path = secrets_file(run_id, node_rank)
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    path.unlink()
    secrets: dict[str, str] = json.loads(text)
    return secrets


def _user_directory() -> Path:
    """Return this user's private directory inside the temporary directory. Raises LaunchError if it is not private."""
    path = Path(tempfile.gettempdir()) / f"neox-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LaunchError(f"{path} is not a private directory of this user: remove it, or set TMPDIR")
    return path


# -- process ids, in the directory of a host's logs

_PIDS_FILE = "pids.json"


def write_pids(logs: Path, pids: Mapping[str, int]) -> None:
    """Write the process ids of a host's agent (`agent`) and ranks, for people and for `neox.launch.status`."""
    with suppress(OSError):  # nothing of the run depends on it
        write_text(logs / _PIDS_FILE, json.dumps(pids) + "\n")


def read_pids(logs: Path) -> dict[str, int]:
    """Return what `write_pids` has written; nothing if the file is missing or damaged."""
    return read_json_object(logs / _PIDS_FILE)


# -- called by ranks


def report_progress(step: int | None = None) -> None:
    """Report that this rank is making progress. A training loop calls it once a step (tens of microseconds).

    A run is ended, and the stacks of all ranks are shown, if for `hang_timeout` seconds no rank calls this and none
    prints anything.

    Args:
        step: Number of completed steps, by which the launcher detects repeated failures at the same step.
    """
    path = os.environ.get(PROGRESS_VARIABLE)
    if not path:
        return
    if step is None:
        Path(path).touch()
        return
    with suppress(OSError):  # a full disk must not end the run
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, b"%0*d" % (_STEP_DIGITS, step))  # in place, so that no reader finds an empty file
        finally:
            os.close(descriptor)


def has_launcher() -> bool:
    """Return whether a launcher follows this rank's start, which may decide to start again."""
    return bool(os.environ.get(LAUNCHER_VARIABLE))


def host_name() -> str:
    """Return the name by which the launcher knows this rank's host; the machine's own name without a launcher."""
    return os.environ.get(HOST_VARIABLE) or socket.gethostname()


def report_failure(report: FailureReport) -> None:
    """Report why this rank is about to end, for the decision on a restart."""
    progress = _progress_of_this_rank()
    if progress is not None:
        with suppress(OSError):
            _failure_path(*progress).write_text(json.dumps(asdict(report)))


def acknowledge_stop() -> None:
    """Answer SIGTERM or Ctrl-C: this rank will end by itself. Call this in the signal's handler.

    The rank then has `stop_timeout` seconds to save. One that neither answers nor ends is killed after a few seconds.
    """
    progress = _progress_of_this_rank()
    if progress is not None:
        with suppress(OSError):  # the agent has ended and needs no answer
            _answer_path(*progress).touch()


@contextmanager
def busy_saving() -> Iterator[None]:
    """Mark that this rank is writing a checkpoint, so that a signal counts as answered.

    Python runs no signal handler while C code waits for a disk or for another rank.
    """
    progress = _progress_of_this_rank()
    if progress is None:
        yield
        return
    path = _busy_path(*progress)
    with suppress(OSError):
        path.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _answer_path(progress: Path, rank: int) -> Path:
    return progress.with_name(f"stopping.{rank}")


def _busy_path(progress: Path, rank: int) -> Path:
    return progress.with_name(f"saving.{rank}")


def _failure_path(progress: Path, rank: int) -> Path:
    return progress.with_name(f"failure.{rank}")


def _progress_of_this_rank() -> tuple[Path, int] | None:
    """Return the progress file and the number of this rank; None outside a run."""
    path = os.environ.get(PROGRESS_VARIABLE)
    rank = os.environ.get("RANK")
    if not path or not rank:
        return None
    return Path(path), int(rank)


# -- read by the agent


class RankActivity:
    """Times at which the ranks of one host reported progress or printed, and their answers to a signal.

    Args:
        file: File that ranks touch to report progress.
        log_dir: Directory of the ranks' logs.
    """

    def __init__(self, file: Path, log_dir: Path) -> None:
        self.file = file
        self.log_dir = log_dir
        self._last_report = 0.0
        self._longest_pause = 0.0

    def update(self) -> None:
        """Read the time of the last report. The agent calls this many times a second."""
        with suppress(OSError):
            now = self.file.stat().st_mtime
            if self._last_report:
                self._longest_pause = max(self._longest_pause, now - self._last_report)
            self._last_report = now

    def answer_seconds(self) -> float:
        """Return the seconds in which a healthy rank answers a signal.

        Python runs a signal handler between two training steps. Long steps therefore get more time: until twice the
        longest pause between two reports has passed since the last report.
        """
        deadline = self._last_report + 2 * self._longest_pause
        return max(ANSWER_SECONDS, deadline - time.time())

    def step(self) -> int | None:
        """Return the number of completed steps that ranks reported; None if they reported none."""
        try:
            return int(self.file.read_text())
        except (OSError, ValueError):  # not written yet
            return None

    def failure(self, rank: int) -> FailureReport | None:
        """Return the failure report of a rank; None if there is none."""
        try:
            return FailureReport.from_json(json.loads(_failure_path(self.file, rank).read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def has_answered(self, rank: int) -> bool:
        """Return whether a rank has answered the signal, or cannot answer yet because it is saving."""
        return _answer_path(self.file, rank).exists() or _busy_path(self.file, rank).exists()


class Silence:
    """Time for which no rank of this host has reported progress or printed.

    File times come from the wall clock, which may jump. So a change of a file's time is detected, and the time since
    then is measured with the monotonic clock.

    Args:
        activity: Files of the ranks.
    """

    def __init__(self, activity: RankActivity) -> None:
        self._activity = activity
        self._times = self._read_times()
        self._changed_at = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds since the last observed activity, or since construction."""
        times = self._read_times()
        now = time.monotonic()
        if times != self._times:
            self._times = times
            self._changed_at = now
        return now - self._changed_at

    def _read_times(self) -> dict[Path, int]:
        """Return when each file was last written, in nanoseconds of the wall clock."""
        times = {}
        for path in (self._activity.file, *self._activity.log_dir.glob("rank_*.log")):
            with suppress(OSError):  # not written yet
                times[path] = path.stat().st_mtime_ns
        return times
