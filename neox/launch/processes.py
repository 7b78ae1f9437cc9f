"""Processes of this machine: death with the parent, process groups, identity and state, exit status.

Linux can signal a child when the thread that created it ends (`PR_SET_PDEATHSIG`); the setting survives `exec`. Every
rank is in a session of its own, so that everything it has started can be killed with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_START_FIELD = 19  # index among the fields after the name (field 22 in proc(5))


def parent_death_hook(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """Return a `preexec_fn` that makes the new process receive a signal when its parent ends.

    Start the process from the main thread: the kernel watches the thread, not the process.

    Args:
        signum: Number of the signal.
    """
    libc = ctypes.CDLL(None)  # before the fork: loading a library between fork and exec can deadlock
    parent = os.getpid()

    def hook() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signum))
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)

    return hook


def signal_group(pid: int, signum: int) -> None:
    """Signal the process group that `pid` leads, if it still exists."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return process_state(pid) not in ("", "Z", "X")


def process_state(pid: int) -> str:
    """Return the kernel's one-letter state of a process (`R`, `S`, `D`, `T` stopped, `Z`), or "" without a process."""
    fields = _stat_fields(pid)
    return fields[0] if fields else ""


def process_start(pid: int) -> str:
    """Return when a process started, in clock ticks since the kernel booted; "" without a process.

    Together with the process id it identifies a process, because process ids are reused.
    """
    fields = _stat_fields(pid)
    return fields[_START_FIELD] if len(fields) > _START_FIELD else ""


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the name, the first of which is the state."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def exit_status(returncode: int) -> int:
    """Convert a `Popen.returncode` to a shell's exit status, which is 128 + its number for a signal."""
    if returncode < 0:
        return 128 - returncode
    return returncode
