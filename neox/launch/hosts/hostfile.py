"""Hosts and slots of a run: the hostfile, and the selection among its hosts."""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from neox.errors import ConfigError
from neox.launch.spec import Host, SlotId
from neox.log import get_logger
from neox.problems import Problem

_log = get_logger(__name__)

# A host name is passed to ssh and pdsh, so it must hold nothing that they or a shell interpret.
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_SETTING = re.compile(r"\s+(?P<key>[A-Za-z_-]+)\s*=\s*(?P<value>\S+)")
_SLOTS = ("slots", "slot", "count", "cpu")  # DeepSpeed's, an old spelling, and Open MPI's other names
_MAX_SLOTS = ("max_slots", "max-slots", "slots_max", "slots-max")
_USER = ("username", "user_name", "user-name")
_COUNTED_NAME = re.compile(r"(?P<name>[^\s:]+):(?P<slots>\d+)")  # in files of MPICH and Intel MPI
_SLOT_LIST = re.compile(r"\d+(,\d+)*")
_LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")
_HOSTS_FILE = Path("/etc/hosts")


def is_this_machine(name: str) -> bool:
    """Return whether a host name or address, optionally with `user@`, means the machine that this process runs on."""
    user, _, host = name.lower().rpartition("@")
    if user and user != _own_user():  # ssh changes the user
        return False
    own = socket.gethostname().lower()
    if host in (*_LOCAL_NAMES, own):
        return True
    if _is_address(host):
        return is_own_address(host)
    domains = {text.partition(".")[2] for text in (host, own)} - {""}
    if host.partition(".")[0] == own.partition(".")[0] and len(domains) < 2:
        return True
    return any(is_own_address(address) for address in _addresses_in_hosts_file(host))


def _own_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name.lower()
    except KeyError:  # containers may run as a user without a name
        return ""


def is_loopback(name: str) -> bool:
    """Return whether a host name or address means every machine itself, such as `localhost`."""
    return name.lower() in _LOCAL_NAMES or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def is_own_address(address: str) -> bool:
    """Return whether an IP address is one of this machine's: the system then sends from that address to it."""
    parsed = ipaddress.ip_address(address)
    if parsed.is_loopback:
        return True
    if parsed.is_unspecified or parsed.is_multicast:
        return False
    sender = sending_address(address)
    return sender is not None and ipaddress.ip_address(sender) == parsed


def sending_address(host: str) -> str | None:
    """Return the address of this machine from which it sends to another host; None if it does not know how."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket, so that nothing is sent
            return str(probe.getsockname()[0])
    except OSError:  # no such name, or no route there
        return None


def _is_address(text: str) -> bool:
    """Return whether a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def _addresses_in_hosts_file(name: str) -> Sequence[str]:
    """Return the addresses that the system's file of hosts gives a name. No server is asked."""
    try:
        changed = _HOSTS_FILE.stat().st_mtime_ns
        return _read_hosts_file(_HOSTS_FILE, changed).get(name, ())
    except (OSError, UnicodeDecodeError):
        return ()


@lru_cache(maxsize=1)
def _read_hosts_file(path: Path, _changed: int) -> dict[str, list[str]]:
    """Return the addresses of each name in a file of hosts. Large clusters ask for every host, several times."""
    addresses: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        address, *names = line.partition("#")[0].lower().split() or [""]
        for name in names:
            if _is_address(address):
                addresses.setdefault(name, []).append(address)
    return addresses


def resolves_to_this_machine(name: str) -> bool:
    """Return whether a name server gives a host name one of this machine's addresses."""
    try:
        found = socket.getaddrinfo(name.rpartition("@")[2], None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(is_own_address(str(entry[4][0]).partition("%")[0]) for entry in found)


def check_host_name(name: str, where: str) -> str:
    """Check that a text is a plain host name or an IP address, optionally with `user@`.

    Args:
        name: The text to check.
        where: File and line, or the key that holds the name, for the message.

    Returns:
        The name, unchanged.

    Raises:
        ConfigError: The text is anything else.
    """
    user, at, host = name.rpartition("@")
    is_plain = _NAME.fullmatch(name) or (_is_address(host) and _NAME.fullmatch(f"{user}{at}host"))
    if not is_plain:
        raise ConfigError(f"{where}: {name!r} is not a host name (letters, digits, '.', '-', '_', optionally user@)")
    return name


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Read the `host slots=N` lines of a hostfile. `host slots=N spare` is a spare host, which may replace another one.

    `#` starts a comment. Blank lines, a byte order mark and CRLF line ends are accepted. `slot=N`, an old spelling, is
    accepted with a warning. Open MPI's `max_slots=N` and `username=NAME` and MPICH's `host:N` are read.

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
    """Return the host of a line.

    DeepSpeed reads `host slots=N` and ignores what follows; Open MPI defines what may follow.
    """
    words = content.split(maxsplit=1)
    name = words[0]
    rest = f" {words[1]}" if len(words) > 1 else ""
    expected = f"{where}: expected `host slots=N` or `host slots=N spare`, found {content!r}"
    spare = re.search(r"\s+spare$", rest)
    if spare is not None:
        rest = rest[: spare.start()]
    settings = _settings_of_line(rest, where, expected)
    counted = _COUNTED_NAME.fullmatch(name)
    if counted is not None and "slots" not in settings:
        name = counted["name"]
        settings["slots"] = counted["slots"]
    if not settings.get("slots", "").isdecimal() or not settings.get("max_slots", "0").isdecimal():
        raise ConfigError(expected)
    slots = int(settings["slots"])
    if slots == 0:
        raise ConfigError(f"{where}: host {name} has no slots; take the line out, or give it at least one")
    if "max_slots" in settings and int(settings["max_slots"]) < slots:
        raise ConfigError(f"{where}: host {name} has more slots ({slots}) than max_slots ({settings['max_slots']})")
    if "username" in settings and "@" not in name:
        name = f"{settings['username']}@{name}"
    return Host(check_host_name(name, where), tuple(range(slots)), spare=spare is not None)


def _settings_of_line(rest: str, where: str, expected: str) -> dict[str, str]:
    """Return what follows the name of a host as slots, max_slots and username."""
    settings: dict[str, str] = {}
    position = 0
    while position < len(rest):
        match = _SETTING.match(rest, position)
        if match is None:
            raise ConfigError(expected)
        key = _role_of(match["key"].lower())
        if key is None:
            raise ConfigError(f"{expected}; {match['key']} is not read: slots, max_slots and username are")
        if match["key"] == "slot":
            _log.warning("%s: `slot=` is an old spelling of `slots=`", where)
        if key in settings:
            raise ConfigError(f"{expected}; {match['key']} is given twice")
        settings[key] = match["value"]
        position = match.end()
    return settings


def _role_of(key: str) -> str | None:
    """Return what a key of a hostfile's line says: slots, max_slots or username; None if it is not read."""
    for role, keys in (("slots", _SLOTS), ("max_slots", _MAX_SLOTS), ("username", _USER)):
        if key in keys:
            return role
    return None


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
        name, colon, slots = part.strip(), "", ""
        if name not in known:
            name, colon, slots = name.rpartition(":") if ":" in name else (name, "", "")
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
