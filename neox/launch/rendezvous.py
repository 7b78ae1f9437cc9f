"""The private directory where a node's agent can be found: its socket, its process id, its ranks' progress."""

from __future__ import annotations

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
    if (path := _own_file(answer_path)) is not None:
        with suppress(OSError):  # the agent is gone: nobody waits for an answer
            path.touch()


@contextmanager
def busy_saving() -> Iterator[None]:
    """Say that this rank writes a checkpoint: a signal meanwhile counts as answered.

    Python hears no signal while a disk, or another rank that is not as far, is waited for in C code.
    """
    path = _own_file(busy_path)
    with suppress(OSError):
        if path is not None:
            path.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            if path is not None:
                path.unlink(missing_ok=True)


def answer_path(progress: Path, rank: int) -> Path:
    """The file by which a rank answers a signal, beside the one that it touches for progress."""
    return progress.with_name(f"stopping.{rank}")


def busy_path(progress: Path, rank: int) -> Path:
    """The file that is there while a rank writes a checkpoint."""
    return progress.with_name(f"saving.{rank}")


def _own_file(path_of: Callable[[Path, int], Path]) -> Path | None:
    """This rank's file of a kind; None outside a run."""
    path, rank = os.environ.get(PROGRESS_VARIABLE), os.environ.get("RANK")
    return path_of(Path(path), int(rank)) if path and rank else None


def _own_directory() -> Path:
    """A directory in the temporary one that belongs to this user alone."""
    path = Path(tempfile.gettempdir()) / f"neox-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LaunchError(f"{path} is not a private directory of this user: remove it, or set TMPDIR")
    return path
