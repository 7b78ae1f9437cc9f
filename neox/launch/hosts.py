"""Hosts and slots: the hostfile, and which part of it a run uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from neox.errors import LaunchError
from neox.launch.spec import Host, SlotId
from neox.log import get_logger

_log = get_logger(__name__)

# A name is handed to ssh and pdsh: nothing that either, or a shell, could read as something else.
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_LINE = re.compile(r"(?P<name>\S+)(?:\s+(?P<key>slots?)\s*=\s*(?P<slots>\d+))?")
LOCAL_NAMES = ("localhost", "127.0.0.1")


def check_host_name(name: str, where: str) -> str:
    """Return the name; raise LaunchError where it is not a plain host name or IPv4 address (optionally `user@`)."""
    if not _NAME.fullmatch(name):
        raise LaunchError(f"{where}: {name!r} is not a host name (letters, digits, '.', '-', '_', optionally user@)")
    return name


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Read `host slots=N` lines; `#` starts a comment, blank lines and CRLF line ends are fine.

    `slot=N` (an old spelling) works with a warning. Raises LaunchError with file and line for anything else, for a
    host named twice, for zero slots and for a file without hosts.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise LaunchError(f"hostfile {path} does not exist: write one `host slots=N` line for each host") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"hostfile {path} cannot be read: {error}") from None
    hosts: dict[str, tuple[Host, int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if content:
            host = _parse_line(content, f"{path}:{number}")
            if host.name in hosts:
                raise LaunchError(f"{path}:{number}: host {host.name} is on line {hosts[host.name][1]} already")
            hosts[host.name] = (host, number)
    if not hosts:
        raise LaunchError(f"hostfile {path} names no host: write one `host slots=N` line for each host")
    return tuple(host for host, _ in hosts.values())


def _parse_line(content: str, where: str) -> Host:
    match = _LINE.fullmatch(content)
    if match is None or match["slots"] is None:
        raise LaunchError(f"{where}: expected `host slots=N`, found {content!r}")
    if match["key"] == "slot":
        _log.warning("%s: `slot=` is an old spelling of `slots=`", where)
    if int(match["slots"]) == 0:
        raise LaunchError(f"{where}: host {match['name']} has no slots; take the line out, or give it at least one")
    return Host(check_host_name(match["name"], where), tuple(range(int(match["slots"]))))


def select_hosts(
    hosts: Sequence[Host],
    *,
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: int = -1,
    num_gpus: int | None = None,
) -> tuple[Host, ...]:
    """Choose the hosts and slots of a run, in the hostfile's order.

    include, exclude: `worker-0:0,2@worker-1`, only one of both. num_nodes: the first so many hosts. num_gpus: the
    first so many slots of each. Raises LaunchError when more is asked for than there is.
    """
    if include and exclude:
        raise LaunchError("include and exclude are both set: use one of them")
    if (include or exclude) and (num_nodes > 0 or num_gpus):
        raise LaunchError("include/exclude choose hosts and slots already: take num_nodes and num_gpus out")
    if include:
        wanted = _parse_filter(include, "include", hosts)
        hosts = [Host(h.name, wanted[h.name] or h.slots) for h in hosts if h.name in wanted]
    elif exclude:
        unwanted = _parse_filter(exclude, "exclude", hosts)
        hosts = [Host(h.name, _without(h, unwanted)) for h in hosts]
    if num_nodes > len(hosts):
        raise LaunchError(f"num_nodes is {num_nodes}, but there are only {len(hosts)} hosts")
    hosts = hosts[:num_nodes] if num_nodes > 0 else hosts
    if num_gpus:
        for host in hosts:
            if num_gpus > len(host.slots):
                raise LaunchError(f"num_gpus is {num_gpus}, but host {host.name} has only {len(host.slots)} slots")
        hosts = [Host(host.name, host.slots[:num_gpus]) for host in hosts]
    chosen = tuple(host for host in hosts if host.slots)
    if not chosen:
        raise LaunchError("no host is left after include/exclude")
    return chosen


def _without(host: Host, unwanted: dict[str, tuple[SlotId, ...]]) -> tuple[SlotId, ...]:
    if host.name not in unwanted:
        return host.slots
    gone = unwanted[host.name] or host.slots
    return tuple(slot for slot in host.slots if slot not in gone)


def _parse_filter(text: str, key: str, hosts: Sequence[Host]) -> dict[str, tuple[SlotId, ...]]:
    """Read `a:0,2@b`: host -> slots, () for all of them."""
    known = {host.name: host.slots for host in hosts}
    result: dict[str, tuple[SlotId, ...]] = {}
    for part in text.split("@"):
        name, colon, slots = part.strip().partition(":")
        if name not in known:
            raise LaunchError(
                f"{key} {text!r} names the host {name!r}, which is not in the hostfile: {', '.join(known)}"
            )
        if name in result:
            raise LaunchError(f"{key} {text!r} names the host {name} twice")
        if colon and not re.fullmatch(r"\d+(,\d+)*", slots):
            raise LaunchError(f"{key} {text!r}: {slots!r} is not a list of slots such as 0,2")
        chosen = tuple(sorted({int(slot) for slot in slots.split(",")})) if colon else ()
        missing = [slot for slot in chosen if slot not in known[name]]
        if missing:
            raise LaunchError(f"{key} {text!r}: host {name} has {len(known[name])} slots, so no slot {missing[0]}")
        result[name] = chosen
    return result
