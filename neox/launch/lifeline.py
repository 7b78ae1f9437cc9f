"""Ties between processes: death with the parent, process groups, and a launcher or connection that is gone.

Linux signals a child when the thread that made it ends (`PR_SET_PDEATHSIG`), also after `exec`. Every rank is in a
session of its own, so that everything it has started can be killed with it.

The end of an agent's standard input is the end of the launcher, of pdsh or of ssh. A cut network sends no end, and the
kernel repeats packets for a quarter of an hour. But an agent writes every second: where the kernel has had to repeat
packets for `LOST_SECONDS`, the other side is gone. (In the other direction ssh's ServerAliveInterval tells the
launcher. Behind a jump host only the connection to that host is seen.)
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

LOST_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 1.0
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = "01"


def parent_death_hook(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """Return a `preexec_fn` that makes the new process receive a signal when its parent ends.

    Start the process from the main thread: the kernel watches the thread, not the process.

    Args:
        signum: The signal.
    """
    libc = ctypes.CDLL(None)  # loaded before the fork: loading between fork and exec can deadlock
    parent = os.getpid()

    def hook() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signum))
        if os.getppid() != parent:  # the parent ended before prctl
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
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def exit_status(returncode: int) -> int:
    """Convert a `Popen.returncode` to a shell's exit status, which for a signal is 128 + its number."""
    return returncode if returncode >= 0 else 128 - returncode


def ssh_ports(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the local and the remote port of the ssh connection around this process; None without one."""
    words = environment.get("SSH_CONNECTION", "").split()
    return (int(words[3]), int(words[1])) if len(words) == 4 else None


def is_unanswered(ports: tuple[int, int], tables: Iterable[str] = _TABLES) -> bool:
    """Return whether the kernel is repeating packets or probes on a TCP connection.

    A peer that is there but reads nothing answers probes, which resets their count.

    Args:
        ports: Local and remote port of the connection.
        tables: The kernel's tables of connections.
    """
    wanted = tuple(f"{port:04X}" for port in ports)
    repeated = []
    for table in tables:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:  # no IPv6 here
            continue
        for line in lines:  # sl local remote state tx:rx timer:when repeats uid probes ...
            fields = line.split()
            found = (fields[1].rpartition(":")[2], fields[2].rpartition(":")[2])
            if found == wanted and fields[3] == _ESTABLISHED:
                repeated.append(int(fields[6], 16) > 0 or int(fields[8]) > 0)
    return bool(repeated) and all(repeated)  # another client may have the same port: then both count


def follow_launcher(
    descriptor: int,
    on_lost: Callable[[], None],
    unanswered: Callable[[], bool],
    seconds: float = LOST_SECONDS,
) -> threading.Thread:
    """Start a thread that watches for the end of the launcher; the main thread may be blocked by a full pipe.

    Args:
        descriptor: The input whose end is the launcher's end.
        on_lost: Called, in the thread, at the end of the input or after unanswered packets.
        unanswered: Whether packets are being repeated now.
        seconds: How long packets must be unanswered.
    """

    def follow() -> None:
        since: float | None = None
        while since is None or time.monotonic() - since < seconds:
            if select.select([descriptor], [], [], min(_LOOK_SECONDS, seconds / 4))[0]:
                if not os.read(descriptor, 4096):
                    break
            elif not unanswered():
                since = None
            elif since is None:
                since = time.monotonic()
        on_lost()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return thread
