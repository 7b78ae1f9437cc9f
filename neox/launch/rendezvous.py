"""The private directory where a node's agent can be found: its socket, its process id, its ranks' progress."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from neox.errors import LaunchError
from neox.launch.lifeline import is_alive

PROGRESS_VARIABLE = "NEOX_PROGRESS_FILE"
CPU_RANKS_VARIABLE = "NEOX_CPU_RANKS"
_LEFTOVER_SECONDS = 3600


def agent_directory(run_id: str, node_rank: int) -> Path:
    """Path of the directory of one agent; the same for everyone who knows the run's id."""
    return _own_directory() / f"{run_id}.{node_rank}"


def create_agent_directory(run_id: str, node_rank: int) -> Path:
    """Make the directory and write this process's id into it."""
    directory = agent_directory(run_id, node_rank)
    _remove_leftovers(directory.parent)
    directory.mkdir(mode=0o700)
    (directory / "pid").write_text(str(os.getpid()))
    return directory


def _remove_leftovers(parent: Path) -> None:
    """Take away what agents left that were killed: old, and without a living process."""
    for entry in parent.iterdir():
        with suppress(OSError, ValueError):
            if time.time() - entry.lstat().st_mtime < _LEFTOVER_SECONDS:
                continue
            if entry.is_file():
                entry.unlink()
            elif not is_alive(int((entry / "pid").read_text())):
                shutil.rmtree(entry)


def report_progress() -> None:
    """Say that this rank got on; a training loop calls it once a step (a few microseconds).

    A run whose ranks neither call this nor print anything for `hang_timeout` seconds is ended with every rank's stack.
    """
    path = os.environ.get(PROGRESS_VARIABLE)
    if path:
        Path(path).touch()


def acknowledge_stop() -> None:
    """Say that this rank heard SIGTERM or Ctrl-C and ends by itself; call it in the signal's handler.

    It then has `stop_timeout` seconds to save; ranks that neither say this nor end are killed after a few seconds.
    """
    path, rank = os.environ.get(PROGRESS_VARIABLE), os.environ.get("RANK")
    if path and rank:
        with suppress(OSError):  # the agent is gone: nobody waits for an answer
            answer_path(Path(path), int(rank)).touch()


def answer_path(progress: Path, rank: int) -> Path:
    """The file by which a rank answers a signal, beside the one that it touches for progress."""
    return progress.with_name(f"stopping.{rank}")


def _own_directory() -> Path:
    """A directory in the temporary one that belongs to this user alone."""
    path = Path(tempfile.gettempdir()) / f"neox-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LaunchError(f"{path} is not a private directory of this user: remove it, or set TMPDIR")
    return path
