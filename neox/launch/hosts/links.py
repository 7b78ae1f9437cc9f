"""Measurement of the links between hosts, one of the launcher's checks before a start.

`python -m neox.launch.hosts.links INTERFACE TOKEN` runs on each host: it prints the address at which it listens, counts
the bytes that others send, and sends to each peer that a line on its standard input names. Each transfer is limited in
time and size.

First, all hosts send to the next host in a ring at the same time. Then the hosts at both ends of a slow or broken link
are measured again, in both directions, with a host whose own links are good. This shows which of them is at fault. A
link that is slow again is measured twice more, because a host may be busy for a moment.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median_high

from neox.errors import run_script
from neox.launch.processes import parent_death_hook

LEAST_FRACTION = 0.25
"""Smallest acceptable speed of a link, as a fraction of the median speed."""
_FAST_ENOUGH = 5e8  # bytes/s; above this, a single connection and Python limit the speed, not the link
_SEND_SECONDS = 0.3
_SEND_BYTES = 256 * 2**20
_CHUNK_BYTES = 2**18
_BUFFER_BYTES = 2**18  # small, so that little data is in flight when a slow transfer ends
_REPEATS = 3  # measurements of a suspect
_PEER_SECONDS = 3.0  # timeout for connecting, and for the confirmation
_SIOCGIFADDR = 0x8915
_COUNT = struct.Struct("!Q")
_MARK = "@link "

Link = tuple[int, int]  # indices of the sending and the receiving host


@dataclass(frozen=True)
class LinkResult:
    """Result of the transfers of one host.

    Attributes:
        speed: Bytes per second over its slowest link to a host that is not at fault; None if no link worked.
        problem: Problem with its links; empty if there is none.
    """

    speed: float | None
    problem: str = ""


# -- the launcher's side


class LinkMeasurement:
    """Measuring processes on all hosts; a context manager that ends them.

    Args:
        commands: Command that runs this module on each host.
        environment: Environment variables of the commands.
        seconds: Time limit after which the processes are killed.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], seconds: float) -> None:
        self._processes = []
        for command in commands:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                preexec_fn=parent_death_hook(),
            )
            self._processes.append(process)
        self._timer = threading.Timer(seconds, self._kill)
        self._timer.daemon = True

    def __enter__(self) -> LinkMeasurement:
        self._timer.start()
        self._addresses = [self._answer(number) for number in range(len(self._processes))]
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    if pipe is not None:
                        pipe.close()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _answer(self, number: int) -> dict[str, object]:
        """Return the next answer of a host; if the process has ended, an answer with an `error`."""
        pipe = self._processes[number].stdout
        assert pipe is not None
        for line in pipe:
            if line.startswith(_MARK):
                answer: dict[str, object] = json.loads(line.removeprefix(_MARK))
                return answer
        return {"error": "the measurement of its links ended without an answer"}

    def send(self, links: Sequence[Link]) -> dict[Link, float | str]:
        """Measure links at the same time. Each host may send on at most one of them.

        Returns:
            Bytes per second, or an error message, for each link.
        """
        found: dict[Link, float | str] = {}
        asked = []
        for sender, receiver in links:
            peer = self._addresses[receiver]
            pipe = self._processes[sender].stdin
            assert pipe is not None
            if "error" in peer or "error" in self._addresses[sender]:
                found[sender, receiver] = str(peer.get("error") or self._addresses[sender]["error"])
                continue
            with suppress(OSError):  # then its answer is missing
                pipe.write(json.dumps(peer) + "\n")
                pipe.flush()
            asked.append((sender, receiver))
        for sender, receiver in asked:
            answer = self._answer(sender)
            speed = answer.get("speed")
            found[sender, receiver] = speed if isinstance(speed, float) else str(answer.get("error"))
        return found


def measure_links(names: Sequence[str], measurement: LinkMeasurement) -> list[LinkResult]:
    """Measure the links of hosts, and find those that are at fault.

    Args:
        names: Names of the hosts, for messages.
        measurement: Running processes on the hosts.

    Returns:
        One result for each host.
    """
    hosts = range(len(names))
    next_hosts = (*hosts[1:], 0)
    found = measurement.send(list(zip(hosts, next_hosts, strict=True)))
    usual = _usual_speed(found)
    bad = []
    for link, result in found.items():
        if not _is_good(result, usual):
            bad.append(link)
    problems: dict[int, str] = {}
    trusted, suspects = _divide(hosts, bad)
    for start in range(0, len(suspects), len(trusted)):
        pairs = list(zip(suspects[start : start + len(trusted)], trusted, strict=False))
        again = _best_of_repeats(pairs, measurement, usual)
        found |= again
        for suspect, other in pairs:
            for link in ((suspect, other), (other, suspect)):
                if not _is_good(again[link], usual):
                    problems[suspect] = _words(names[other], again[link], usual)
    return [LinkResult(_slowest(host, found, problems), problems.get(host, "")) for host in hosts]


def _best_of_repeats(pairs: Sequence[Link], measurement: LinkMeasurement, usual: float) -> dict[Link, float | str]:
    """Measure links in both directions, again while one of them is slow, and return the best result of each.

    A broken link is not tried again: it is not slow for a moment, and each try may last until a timeout.
    """
    best: dict[Link, float | str] = {}
    for _ in range(_REPEATS):
        results = measurement.send(pairs) | measurement.send([(other, suspect) for suspect, other in pairs])
        for link, result in results.items():
            if link not in best or _speed(result) > _speed(best[link]):
                best[link] = result
        is_broken = any(isinstance(result, str) for result in results.values())
        if is_broken or all(_is_good(result, usual) for result in best.values()):
            break
    return best


def _speed(result: float | str) -> float:
    """Return the speed of a transfer; -1 if it failed."""
    if isinstance(result, float):
        return result
    return -1.0


def _usual_speed(found: Mapping[Link, float | str]) -> float:
    """Return the median of each host's fastest link, because one bad host can slow down most links of a small ring."""
    fastest: dict[int, float] = {}
    for link, result in found.items():
        for host in link:
            if isinstance(result, float):
                fastest[host] = max(result, fastest.get(host, 0.0))
    return median_high(fastest.values()) if fastest else 0.0


def _is_good(result: float | str, usual: float) -> bool:
    return isinstance(result, float) and result >= min(LEAST_FRACTION * usual, _FAST_ENOUGH)


def _divide(hosts: Sequence[int], bad: Sequence[Link]) -> tuple[list[int], list[int]]:
    """Return the trusted hosts, and the suspects, which are measured again with trusted hosts.

    With two hosts it is impossible to tell which one is at fault; the second one is then suspected.
    """
    bad_links = Counter(host for link in bad for host in link)
    fewest = min(bad_links[host] for host in hosts)
    trusted = [host for host in hosts if bad_links[host] == fewest]
    if fewest:
        trusted = trusted[:1]
    return trusted, sorted(set(bad_links) - set(trusted))


def _words(other: str, result: float | str, usual: float) -> str:
    if isinstance(result, str):
        return f"its link to {other} does not work: {result}"
    return (
        f"its link to {other} carries {result / 1e6:,.0f} MB/s, less than {LEAST_FRACTION:.0%} of the median of "
        f"{usual / 1e6:,.0f} MB/s"
    )


def _slowest(host: int, found: Mapping[Link, float | str], at_fault: Mapping[int, str]) -> float | None:
    """Return the speed of a host's slowest link, ignoring links to other hosts that are at fault."""
    speeds = []
    for link, result in found.items():
        others = set(link) - {host}
        if host in link and isinstance(result, float) and (host in at_fault or not others & set(at_fault)):
            speeds.append(result)
    return min(speeds, default=None)


# -- the side of a host


def address_of(interfaces: str, environment: Mapping[str, str]) -> str:
    """Return the address at which this host listens.

    Args:
        interfaces: Value of NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME: prefixes of names, separated by commas. If it is
            empty or starts with `^`, the address is the one at which ssh has reached this host.
        environment: Environment variables, for those of ssh.

    Raises:
        OSError: There is no such interface, or it has no IPv4 address.
    """
    if interfaces and not interfaces.startswith("^"):
        wanted = tuple(interfaces.removeprefix("=").split(","))
        for _, name in socket.if_nameindex():
            if name.startswith(wanted):
                return _interface_address(name)
        raise OSError(f"it has no network interface {interfaces}")
    words = environment.get("SSH_CONNECTION", "").split()  # client, its port, server, its port
    return words[2] if len(words) == 4 else socket.gethostname()


def _interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


def _serve(listener: socket.socket, token: bytes) -> None:
    """Count the bytes received on each connection, and send back the count. Close connections without the token."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_count, args=(connection, token), daemon=True).start()


def _count(connection: socket.socket, token: bytes) -> None:
    buffer = bytearray(_CHUNK_BYTES)
    with connection, suppress(OSError):
        connection.settimeout(2 * _PEER_SECONDS)
        if _read(connection, len(token)) != token:
            return
        count = 0
        while size := connection.recv_into(buffer):
            count += size
        connection.sendall(_COUNT.pack(count))


def _read(connection: socket.socket, size: int) -> bytes:
    """Read `size` bytes. Raises ConnectionError if there are fewer."""
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return data


def _transfer(peer: Mapping[str, str | int], own: str, token: bytes) -> dict[str, float | str]:
    """Send to a peer for a short time; return the bytes per second that arrived there, or an error."""
    chunk = bytes(_CHUNK_BYTES)
    address = (str(peer["address"]), int(peer["port"]))
    try:
        with socket.create_connection(address, _PEER_SECONDS, (own, 0)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            connection.sendall(token)
            started = time.monotonic()
            sent = 0
            while time.monotonic() - started < _SEND_SECONDS and sent < _SEND_BYTES:
                connection.sendall(chunk)
                sent += len(chunk)
            connection.shutdown(socket.SHUT_WR)
            (arrived,) = _COUNT.unpack(_read(connection, _COUNT.size))
            return {"speed": arrived / (time.monotonic() - started)}
    except OSError as error:
        return {"error": error.strerror or str(error)}


def _tell(answer: Mapping[str, float | str | int]) -> None:
    print(_MARK + json.dumps(answer), flush=True)


def main() -> int:
    """Listen, and send to the peers that standard input names."""
    interfaces, token = sys.argv[1:]
    try:
        own = address_of(interfaces, os.environ)
        listener = socket.create_server((own, 0), family=socket.AF_INET6 if ":" in own else socket.AF_INET)
    except OSError as error:
        _tell({"error": error.strerror or str(error)})
        return 1
    threading.Thread(target=_serve, args=(listener, token.encode()), daemon=True).start()
    _tell({"address": own, "port": listener.getsockname()[1]})
    for line in sys.stdin:
        _tell(_transfer(json.loads(line), own, token.encode()))
    return 0


if __name__ == "__main__":
    run_script(main, unload=False)
