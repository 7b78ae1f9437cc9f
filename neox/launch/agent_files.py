"""Files by which a host's agent, its ranks and the launcher's remote commands exchange state.

They are in a private temporary directory: the agent's process id, a file that ranks touch for progress, their answers
to signals, and, beside it, secrets.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from neox.errors import LaunchError
from neox.launch.lifeline import is_alive

PROGRESS_VARIABLE = "NEOX_PROGRESS_FILE"
# Nothing may be left ten seconds after a signal; half of that is for the end itself, on a busy machine.
ANSWER_SECONDS = 5.0
_OLD_SECONDS = 3600


# -- the directory


def agent_directory(run_id: str, node_rank: int) -> Path:
    """Return the path of an agent's directory."""
    return _user_directory() / f"{run_id}.{node_rank}"


def create_agent_directory(run_id: str, node_rank: int) -> Path:
    """Create the directory of this process, an agent, with its process id in it.

    Directories of dead agents that are over an hour old are removed.
    """
    directory = agent_directory(run_id, node_rank)
    for entry in directory.parent.iterdir():
        with suppress(OSError, ValueError):
            if time.time() - entry.lstat().st_mtime < _OLD_SECONDS:
                continue
            if entry.is_file():
                entry.unlink()
            elif not is_alive(int((entry / "pid").read_text())):
                shutil.rmtree(entry)
    directory.mkdir(mode=0o700)
    (directory / "pid").write_text(str(os.getpid()))
    return directory


def secrets_file(run_id: str, node_rank: int) -> Path:
    """Return the path of the file that holds secrets until the agent has read them."""
    return agent_directory(run_id, node_rank).with_suffix(f".{node_rank}.secrets")


def take_secrets(run_id: str, node_rank: int) -> dict[str, str]:
    """Read and remove the secrets that were stored on this host."""
    path = secrets_file(run_id, node_rank)
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    path.unlink()
    found: dict[str, str] = json.loads(text)
    return found


def _user_directory() -> Path:
    """Return a directory inside the temporary one that belongs to this user alone."""
    path = Path(tempfile.gettempdir()) / f"neox-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LaunchError(f"{path} is not a private directory of this user: remove it, or set TMPDIR")
    return path


# -- called by ranks


def report_progress() -> None:
    """Report that this rank is making progress; a training loop calls it once a step (a few microseconds).

    A run whose ranks neither call this nor print anything for `hang_timeout` seconds is ended with every rank's stack.
    """
    path = os.environ.get(PROGRESS_VARIABLE)
    if path:
        Path(path).touch()


def acknowledge_stop() -> None:
    """Answer SIGTERM or Ctrl-C: this rank ends by itself. Call it in the signal's handler.

    The rank then has `stop_timeout` seconds to save; ranks that neither answer nor end are killed after a few seconds.
    """
    if (path := _file_of_rank(_answer_path)) is not None:
        with suppress(OSError):  # the agent has ended and needs no answer
            path.touch()


@contextmanager
def busy_saving() -> Iterator[None]:
    """Mark that this rank is writing a checkpoint, so that a signal counts as answered.

    Python runs no signal handler while C code waits for a disk or for another rank.
    """
    path = _file_of_rank(_busy_path)
    with suppress(OSError):
        if path is not None:
            path.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            if path is not None:
                path.unlink(missing_ok=True)


def _answer_path(progress: Path, rank: int) -> Path:
    return progress.with_name(f"stopping.{rank}")


def _busy_path(progress: Path, rank: int) -> Path:
    return progress.with_name(f"saving.{rank}")


def _file_of_rank(path_of: Callable[[Path, int], Path]) -> Path | None:
    """Return this rank's file of a kind; None outside a run."""
    path, rank = os.environ.get(PROGRESS_VARIABLE), os.environ.get("RANK")
    return path_of(Path(path), int(rank)) if path and rank else None


# -- read by the agent


class RankActivity:
    """Times at which the ranks of one host reported progress or printed, and their answers to a signal.

    Args:
        file: The file that ranks touch for progress.
        log_dir: The directory of the ranks' logs.
    """

    def __init__(self, file: Path, log_dir: Path) -> None:
        self.file, self.log_dir = file, log_dir
        self.started = time.time()
        self._reported = 0.0
        self._longest = 0.0

    def update(self) -> None:
        """Read the time of the last report; called many times a second."""
        with suppress(OSError):
            now = self.file.stat().st_mtime
            if self._reported:
                self._longest = max(self._longest, now - self._reported)
            self._reported = now

    def last(self) -> float:
        """Return when a rank last reported progress or printed, in seconds since the epoch."""
        times = [self.started]
        for path in (self.file, *self.log_dir.glob("rank_*.log")):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def answer_seconds(self) -> float:
        """Return the seconds in which a healthy rank answers a signal.

        Python runs a signal handler between two training steps, so where steps are long, and the last one was not long
        ago, a rank has twice the longest time between two reports.
        """
        return max(ANSWER_SECONDS, self._reported + 2 * self._longest - time.time())

    def has_answered(self, rank: int) -> bool:
        """Return whether a rank has answered the signal, or cannot yet because it is saving."""
        return _answer_path(self.file, rank).exists() or _busy_path(self.file, rank).exists()
