"""Ties between processes: a child that dies with its parent, and process groups that end together.

Linux tells a child when the thread that made it ends (`PR_SET_PDEATHSIG`); the tie survives `exec`. Together with a
session per rank, so that whatever a rank started can be ended with it, nothing outlives the run, whoever is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def parent_death_hook(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """Return a `preexec_fn` that makes the new process receive `signum` when its parent ends.

    Call it and start the process from the main thread: the kernel watches the thread, not the process.
    """
    libc = ctypes.CDLL(None)  # loaded before the fork: loading between fork and exec can deadlock
    parent = os.getpid()

    def hook() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signum))
        if os.getppid() != parent:  # the parent ended before the tie was made
            os._exit(1)

    return hook


def signal_group(pid: int, signum: int) -> None:
    """Send a signal to the process group led by `pid`; a group that is gone already is fine."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    return process_state(pid) not in ("", "Z", "X")


def process_state(pid: int) -> str:
    """Return the kernel's one-letter state of a process (`R`, `S`, `D`, `T` stopped, `Z`), "" when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def exit_status(returncode: int) -> int:
    """Translate a `Popen.returncode` into a shell's exit status: death by a signal is 128 + its number."""
    return returncode if returncode >= 0 else 128 - returncode
