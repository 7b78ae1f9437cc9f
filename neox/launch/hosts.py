"""Hosts and slots of a run: the hostfile, and the selection among its hosts."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from neox.errors import ConfigError
from neox.launch.spec import Host, SlotId
from neox.log import get_logger
from neox.problems import Problem

_log = get_logger(__name__)

# A host name is passed to ssh and pdsh, so it must hold nothing that they or a shell interpret.
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_LINE = re.compile(r"(?P<name>\S+)(?:\s+(?P<key>slots?)\s*=\s*(?P<slots>\d+))?(?P<spare>\s+spare)?")
_SLOT_LIST = re.compile(r"\d+(,\d+)*")
_LOCAL_NAMES = ("localhost", "127.0.0.1")


def is_this_machine(name: str) -> bool:
    """Return whether a host name means the machine that this process runs on."""
    return name in _LOCAL_NAMES or name.partition(".")[0] == socket.gethostname().partition(".")[0]


def check_host_name(name: str, where: str) -> str:
    """Check that a text is a plain host name or an IPv4 address, optionally with `user@`.

    Args:
        name: The text to check.
        where: File and line, or the key that holds the name, for the message.

    Returns:
        The name, unchanged.

    Raises:
        ConfigError: The text is anything else.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: {name!r} is not a host name (letters, digits, '.', '-', '_', optionally user@)")
    return name


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Read the `host slots=N` lines of a hostfile. `host slots=N spare` is a spare host, which may replace another one.

    `#` starts a comment. Blank lines, a byte order mark and CRLF line ends are accepted. `slot=N`, an old spelling, is
    accepted with a warning.

    Args:
        path: Path of the hostfile.

    Returns:
        The hosts, in the order of the file.

    Raises:
        ConfigError: A line of another form, a host on two lines, zero slots, or a file without hosts; with file
            and line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"hostfile {path} does not exist: write one `host slots=N` line for each host") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"hostfile {path} cannot be read: {error}") from None
    hosts = []
    line_of_host: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        host = _parse_line(content, f"{path}:{number}")
        if host.name in line_of_host:
            raise ConfigError(f"{path}:{number}: host {host.name} is on line {line_of_host[host.name]} already")
        line_of_host[host.name] = number
        hosts.append(host)
    if all(host.spare for host in hosts):
        found = "only spare hosts" if hosts else "no host"
        raise ConfigError(f"hostfile {path} names {found}: write one `host slots=N` line for each host")
    return tuple(hosts)


def _parse_line(content: str, where: str) -> Host:
    match = _LINE.fullmatch(content)
    if match is None or match["slots"] is None:
        raise ConfigError(f"{where}: expected `host slots=N` or `host slots=N spare`, found {content!r}")
    if match["key"] == "slot":
        _log.warning("%s: `slot=` is an old spelling of `slots=`", where)
    slots = int(match["slots"])
    if slots == 0:
        raise ConfigError(f"{where}: host {match['name']} has no slots; take the line out, or give it at least one")
    return Host(check_host_name(match["name"], where), tuple(range(slots)), spare=match["spare"] is not None)


def select_hosts(
    hosts: Sequence[Host],
    *,
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: int = -1,
    num_gpus: int | None = None,
) -> tuple[Host, ...]:
    """Choose the hosts and slots of a run.

    Args:
        hosts: Hosts of the hostfile.
        include: Hosts and slots to use, as `worker-0:0,2@worker-1`.
        exclude: Hosts and slots not to use, in the same form. Only one of include and exclude can be given.
        num_nodes: Number of hosts to use, counted from the first; -1 for all. Spare hosts are kept and do not count.
        num_gpus: Number of slots to use on each host, counted from the first; None for all.

    Returns:
        The chosen hosts with their chosen slots, in the hostfile's order, and then the spare ones.

    Raises:
        ConfigError: The selection names something that does not exist, or leaves nothing.
    """
    if include and exclude:
        raise refusal("include and exclude are both set: use one of them", "include", "exclude")
    if (include or exclude) and (num_nodes > 0 or num_gpus):
        message = "include/exclude choose hosts and slots already: take num_nodes and num_gpus out"
        raise refusal(message, "num_nodes", "num_gpus")
    if include:
        hosts = _include(hosts, include)
    elif exclude:
        hosts = _exclude(hosts, exclude)
    spares = [host for host in hosts if host.spare]
    hosts = [host for host in hosts if not host.spare]
    if num_nodes > len(hosts):
        raise refusal(f"num_nodes is {num_nodes}, but there are only {len(hosts)} hosts", "num_nodes")
    if num_nodes > 0:
        hosts = hosts[:num_nodes]
    if not any(host.slots for host in hosts):
        raise refusal("no host is left after include/exclude", "include", "exclude")
    hosts = [*hosts, *spares]
    if num_gpus:
        hosts = [_with_first_slots(host, num_gpus) for host in hosts]
    return tuple(host for host in hosts if host.slots)


def _include(hosts: Sequence[Host], include: str) -> list[Host]:
    """Return only the hosts and slots that `include` names."""
    wanted = _parse_filter(include, "include", hosts)
    return [replace(host, slots=wanted[host.name]) for host in hosts if host.name in wanted]


def _exclude(hosts: Sequence[Host], exclude: str) -> list[Host]:
    """Return the hosts without the slots that `exclude` names; a host may be left without slots."""
    unwanted = _parse_filter(exclude, "exclude", hosts)
    result = []
    for host in hosts:
        excluded = unwanted.get(host.name, ())
        result.append(replace(host, slots=tuple(slot for slot in host.slots if slot not in excluded)))
    return result


def _with_first_slots(host: Host, count: int) -> Host:
    if count > len(host.slots):
        raise refusal(f"num_gpus is {count}, but host {host.name} has only {len(host.slots)} slots", "num_gpus")
    return replace(host, slots=host.slots[:count])


def _parse_filter(text: str, key: str, hosts: Sequence[Host]) -> dict[str, tuple[SlotId, ...]]:
    """Return the slots of each host that a filter such as `a:0,2@b` names. Without `:`, these are all its slots."""
    known = {host.name: host.slots for host in hosts}
    result: dict[str, tuple[SlotId, ...]] = {}
    for part in text.split("@"):
        name, colon, slots = part.strip().partition(":")
        if name not in known:
            message = f"names the host {name!r}, which is not in the hostfile: {', '.join(known)}"
            raise refusal(f"{key} {text!r} {message}", key)
        if name in result:
            raise refusal(f"{key} {text!r} names the host {name} twice", key)
        if not colon:
            result[name] = known[name]
            continue
        if not _SLOT_LIST.fullmatch(slots):
            raise refusal(f"{key} {text!r}: {slots!r} is not a list of slots such as 0,2", key)
        chosen = sorted(set(map(int, slots.split(","))))
        for slot in chosen:
            if slot not in known[name]:
                message = f"host {name} has {len(known[name])} slots, so no slot {slot}"
                raise refusal(f"{key} {text!r}: {message}", key)
        result[name] = tuple(chosen)
    return result


def refusal(message: str, *keys: str) -> ConfigError:
    """Return the error that refuses a choice of hosts.

    Args:
        message: Reason, and what to do.
        keys: Keys of the configuration that it depends on.
    """
    return ConfigError(Problem(keys, message))
