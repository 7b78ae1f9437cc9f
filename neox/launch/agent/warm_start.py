"""Code of a warm process: it imports modules, waits for an assignment, and becomes that rank."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

IMPORTING_NAME = "neox-import"
"""Name of a process that is importing, as `ps -o comm` and `/proc/PID/comm` show it."""
WAITING_NAME = "neox-warm"
"""Name of a process that waits for its assignment."""
RANK_NAME = "neox-rank"
"""Name of a process that has become a rank."""
_ADDED_NICENESS = 5
_READ_BYTES = 65536
_FIRST_KILLED = "1000"  # OOM score adjustment with which the kernel kills this process first
_RANKS_SCORE = "500"


def become_rank(module: str) -> None:
    """Import a module, wait for an assignment on standard input, and take over its environment and arguments.

    Afterwards `sys.argv` holds the script and its arguments. The process exits if the input ends without one.

    Args:
        module: Name of the module.
    """
    _set_name(IMPORTING_NAME)
    _set_score(_FIRST_KILLED)
    niceness = _lower_priority()
    importlib.import_module(module)
    _restore_priority(niceness)
    _set_name(WAITING_NAME)
    assignment = json.loads(_read_line() or "null")
    if assignment is None:
        os._exit(0)
    _set_score(_RANKS_SCORE)
    _set_name(RANK_NAME)
    os.environ.clear()
    os.environ.update(assignment["environment"])
    os.chdir(assignment["directory"])
    _replace_stdin(assignment["stdin"])
    sys.argv = ["bootstrap", *assignment["argv"]]


def _read_line() -> bytes:
    """Read one line from standard input without Python's buffering; return b"" if the input ends first."""
    text = b""
    while not text.endswith(b"\n"):
        data = os.read(0, _READ_BYTES)
        if not data:
            return b""
        text += data
    return text


def _replace_stdin(path: str | None) -> None:
    descriptor = -1
    if path is not None:
        with suppress(OSError):  # sockets cannot be opened again
            descriptor = os.open(path, os.O_RDONLY)
    if descriptor < 0:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)


def _lower_priority() -> int:
    """Lower the priority of this process, if this can be undone. Return the niceness to restore."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if _can_go_back(niceness):
        os.setpriority(os.PRIO_PROCESS, 0, niceness + _ADDED_NICENESS)
    return niceness


def _can_go_back(niceness: int) -> bool:
    """Return whether this process may raise its priority again. Try it in a thread, because niceness is per thread."""
    succeeded = []

    def attempt() -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, niceness + 1)
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
            succeeded.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(succeeded)


def _restore_priority(niceness: int) -> None:
    """Set the niceness of all threads of this process; threads started by imports inherited the main thread's."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(thread), niceness)


def _set_name(name: str) -> None:
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _set_score(score: str) -> None:
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(score)
