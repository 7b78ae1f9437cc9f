"""Detection of a launcher or connection that is gone, by an agent.

An agent's standard input ends when the launcher, pdsh or ssh ends. If the network is cut, it does not end: the kernel
retransmits packets for about 15 minutes. An agent writes every second. So if the kernel has been retransmitting for
`LOST_SECONDS`, the launcher is gone. (The launcher learns from ssh's ServerAliveInterval that an agent's host is gone.
Behind a jump host, only the connection to the jump host is seen.)
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from neox.errors import NeoXError

LOST_SECONDS = 30.0
_LOOK_SECONDS = 1.0
_READ_BYTES = 65536
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = "01"


def ssh_ports(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the local and the remote port of the ssh connection that this process runs in; None without one."""
    fields = environment.get("SSH_CONNECTION", "").split()  # client, its port, server, its port
    if len(fields) != 4:
        return None
    return int(fields[3]), int(fields[1])


def is_unanswered(ports: tuple[int, int], tables: Iterable[str] = _TABLES) -> bool:
    """Return whether the kernel is retransmitting packets or probes on a TCP connection.

    A live peer that reads nothing still answers probes, which resets their count.

    Args:
        ports: Local and remote port of the connection. Several clients may use the same remote port. Then the kernel
            must be retransmitting on all their connections.
        tables: Paths of the kernel's tables of connections.
    """
    is_retransmitting = []
    for table in tables:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:  # no IPv6 here
            continue
        for line in lines:
            # sl local remote state tx:rx timer:when retransmits uid probes ...; addresses and retransmits are in hex
            fields = line.split()
            local = int(fields[1].rpartition(":")[2], 16)
            remote = int(fields[2].rpartition(":")[2], 16)
            if (local, remote) == ports and fields[3] == _ESTABLISHED:
                retransmits = int(fields[6], 16)
                probes = int(fields[8])
                is_retransmitting.append(retransmits > 0 or probes > 0)
    return bool(is_retransmitting) and all(is_retransmitting)


def follow_launcher(
    descriptor: int,
    on_lost: Callable[[], None],
    unanswered: Callable[[], bool],
    seconds: float = LOST_SECONDS,
    on_input: Callable[[bytes], None] | None = None,
) -> threading.Thread:
    """Start a thread that watches for the end of the launcher, because a full pipe may block the main thread.

    Args:
        descriptor: Descriptor of the input, which ends when the launcher ends.
        on_lost: Function to call, in the thread, if the input has ended or packets stay unanswered.
        unanswered: Function that returns whether packets are being retransmitted now.
        seconds: Time for which packets must stay unanswered.
        on_input: Function that takes, in the thread, what the launcher has written; None if it writes nothing. An error
            of this project or a ValueError in it counts as the end of the launcher.
    """
    pause = min(_LOOK_SECONDS, seconds / 4)

    def follow() -> None:
        unanswered_since: float | None = None
        while unanswered_since is None or time.monotonic() - unanswered_since < seconds:
            has_input = bool(select.select([descriptor], [], [], pause)[0])
            if has_input:
                data = os.read(descriptor, _READ_BYTES)
                if not data:
                    break
                if on_input is not None and not _is_accepted(on_input, data):
                    break
            elif not unanswered():
                unanswered_since = None
            elif unanswered_since is None:
                unanswered_since = time.monotonic()
        on_lost()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return thread


def _is_accepted(on_input: Callable[[bytes], None], data: bytes) -> bool:
    """Pass input on. Return whether it was valid."""
    try:
        on_input(data)
    except (ValueError, NeoXError):
        return False
    return True
