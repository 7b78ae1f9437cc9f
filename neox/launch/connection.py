"""Whether the head process is still there, seen from a host: the end of standard input, or ssh's packets unanswered.

The end of that input is the end of the head process, of pdsh or of ssh. A network that is cut sends no end, and the
kernel repeats its packets for a quarter of an hour before it gives up. An agent writes every second, so its connection
always has something to be answered: where the kernel has had to repeat packets all through `LOST_SECONDS`, nobody is
there. (The other way round ssh's ServerAliveInterval tells the head process.) Behind a jump host this sees the way to
that host only.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

LOST_SECONDS = 30.0
_LOOK_SECONDS = 1.0
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = "01"


def ssh_ports(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """This host's and the other side's port of the ssh connection that a process was started by; None without one."""
    words = environment.get("SSH_CONNECTION", "").split()
    return (int(words[3]), int(words[1])) if len(words) == 4 else None


def unanswered(ports: tuple[int, int], tables: Iterable[str] = _TABLES) -> bool:
    """Whether the kernel is repeating packets or probes on the connection between these ports (local, remote).

    A side that is there but reads nothing answers probes: their count goes back to zero.
    """
    ends = tuple(f"{port:04X}" for port in ports)
    repeated = []
    for table in tables:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:  # no IPv6 here
            continue
        for line in lines:  # sl local remote state tx:rx timer:when repeats uid probes ...
            fields = line.split()
            found = (fields[1].rpartition(":")[2], fields[2].rpartition(":")[2])
            if found == ends and fields[3] == _ESTABLISHED:
                repeated.append(int(fields[6], 16) > 0 or int(fields[8]) > 0)
    return bool(repeated) and all(repeated)  # another client may have the same port: then both count


def follow_head(
    descriptor: int,
    lost: Callable[[], None],
    is_unanswered: Callable[[], bool],
    seconds: float = LOST_SECONDS,
) -> threading.Thread:
    """Call `lost` at the end of the input, or when packets went unanswered for `seconds`.

    From a thread: a full pipe may block an agent's main thread where it writes.
    """

    def follow() -> None:
        since: float | None = None
        while since is None or time.monotonic() - since < seconds:
            if select.select([descriptor], [], [], min(_LOOK_SECONDS, seconds / 4))[0]:
                if not os.read(descriptor, 4096):
                    break
            elif not is_unanswered():
                since = None
            elif since is None:
                since = time.monotonic()
        lost()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return thread
