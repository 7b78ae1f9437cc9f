"""Hosts and slots: hostfile, selection, and the accelerators of this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from neox.errors import ConfigError
from neox.launch.spec import Host, SlotId
from neox.log import get_logger

_log = get_logger(__name__)

# A host name is passed to ssh and pdsh, so it must hold nothing that they or a shell interpret.
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_LINE = re.compile(r"(?P<name>\S+)(?:\s+(?P<key>slots?)\s*=\s*(?P<slots>\d+))?")
_LOCAL_NAMES = ("localhost", "127.0.0.1")
# Flags of /proc/cpuinfo, one of which is enough.
_CPU_FLAGS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
# Limit, usage and reclaimable part of a control group's memory, by version: 2 (no name), and 1 (a controller).
_CGROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
LEAST_CAPABILITY = MappingProxyType({"bf16": 8.0, "fp16": 5.3, "fp8": 8.9})
"""Compute capability from which on a GPU multiplies a number format natively."""


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
    """Read the `host slots=N` lines of a hostfile.

    `#` starts a comment; blank lines, a byte order mark and CRLF line ends are accepted. `slot=N`, an old spelling,
    is accepted with a warning.

    Args:
        path: The hostfile.

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
    hosts: dict[str, tuple[Host, int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if content:
            host = _parse_line(content, f"{path}:{number}")
            if host.name in hosts:
                raise ConfigError(f"{path}:{number}: host {host.name} is on line {hosts[host.name][1]} already")
            hosts[host.name] = (host, number)
    if not hosts:
        raise ConfigError(f"hostfile {path} names no host: write one `host slots=N` line for each host")
    return tuple(host for host, _ in hosts.values())


def _parse_line(content: str, where: str) -> Host:
    match = _LINE.fullmatch(content)
    if match is None or match["slots"] is None:
        raise ConfigError(f"{where}: expected `host slots=N`, found {content!r}")
    if match["key"] == "slot":
        _log.warning("%s: `slot=` is an old spelling of `slots=`", where)
    if int(match["slots"]) == 0:
        raise ConfigError(f"{where}: host {match['name']} has no slots; take the line out, or give it at least one")
    return Host(check_host_name(match["name"], where), tuple(range(int(match["slots"]))))


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
        hosts: The hosts of the hostfile.
        include: Hosts and slots to use, as `worker-0:0,2@worker-1`.
        exclude: Hosts and slots not to use, in the same form; only one of include and exclude can be given.
        num_nodes: Use the first so many hosts; -1 for all.
        num_gpus: Use the first so many slots of each host; None for all.

    Returns:
        The chosen hosts with their chosen slots, in the hostfile's order.

    Raises:
        ConfigError: The selection names something that does not exist, or leaves nothing.
    """
    if include and exclude:
        raise ConfigError("include and exclude are both set: use one of them")
    if (include or exclude) and (num_nodes > 0 or num_gpus):
        raise ConfigError("include/exclude choose hosts and slots already: take num_nodes and num_gpus out")
    if include:
        wanted = _parse_filter(include, "include", hosts)
        hosts = [Host(h.name, wanted[h.name] or h.slots) for h in hosts if h.name in wanted]
    elif exclude:
        unwanted = _parse_filter(exclude, "exclude", hosts)
        hosts = [Host(h.name, _without(h, unwanted)) for h in hosts]
    if num_nodes > len(hosts):
        raise ConfigError(f"num_nodes is {num_nodes}, but there are only {len(hosts)} hosts")
    hosts = hosts[:num_nodes] if num_nodes > 0 else hosts
    if num_gpus:
        for host in hosts:
            if num_gpus > len(host.slots):
                raise ConfigError(f"num_gpus is {num_gpus}, but host {host.name} has only {len(host.slots)} slots")
        hosts = [Host(host.name, host.slots[:num_gpus]) for host in hosts]
    chosen = tuple(host for host in hosts if host.slots)
    if not chosen:
        raise ConfigError("no host is left after include/exclude")
    return chosen


def _without(host: Host, unwanted: dict[str, tuple[SlotId, ...]]) -> tuple[SlotId, ...]:
    if host.name not in unwanted:
        return host.slots
    excluded = unwanted[host.name] or host.slots
    return tuple(slot for slot in host.slots if slot not in excluded)


def _parse_filter(text: str, key: str, hosts: Sequence[Host]) -> dict[str, tuple[SlotId, ...]]:
    """Parse `a:0,2@b` into slots by host; an empty tuple stands for all slots of the host."""
    known = {host.name: host.slots for host in hosts}
    result: dict[str, tuple[SlotId, ...]] = {}
    for part in text.split("@"):
        name, colon, slots = part.strip().partition(":")
        if name not in known:
            raise ConfigError(
                f"{key} {text!r} names the host {name!r}, which is not in the hostfile: {', '.join(known)}"
            )
        if name in result:
            raise ConfigError(f"{key} {text!r} names the host {name} twice")
        if colon and not re.fullmatch(r"\d+(,\d+)*", slots):
            raise ConfigError(f"{key} {text!r}: {slots!r} is not a list of slots such as 0,2")
        chosen = tuple(sorted({int(slot) for slot in slots.split(",")})) if colon else ()
        missing = [slot for slot in chosen if slot not in known[name]]
        if missing:
            raise ConfigError(f"{key} {text!r}: host {name} has {len(known[name])} slots, so no slot {missing[0]}")
        result[name] = chosen
    return result


def visible_accelerators(environment: Mapping[str, str] | None = None) -> tuple[SlotId, ...]:
    """Return the GPUs that this process may use.

    Args:
        environment: Where `CUDA_VISIBLE_DEVICES` is read; this process's variables when left out.

    Returns:
        The entries of `CUDA_VISIBLE_DEVICES` where it is set, else the index of every GPU of this machine.
    """
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    present = _present()
    if visible is None or present == 0:
        return tuple(range(present))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(int(name) if name.isdecimal() else name for name in names if name != "-1")


def count_accelerators() -> int:
    """Return the number of GPUs that this process may use."""
    return len(visible_accelerators())


def _present() -> int:
    """Count the GPUs of this machine by their device files, else by asking nvidia-smi."""
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if devices or not Path("/proc/driver/nvidia").exists():
        return len(devices)
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def smallest_memory() -> int | None:
    """Return the memory of this machine's smallest GPU in bytes, or None where nvidia-smi reports none."""
    sizes = [int(word) for word in _nvidia_smi("memory.total") if word.isdecimal()]
    return min(sizes) * 2**20 if sizes else None


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes of main memory that new processes may take, within the limits of control groups around this one.

    Args:
        proc: The kernel's `/proc`.
        cgroups: Where control groups are mounted, of version 1 or 2.

    Returns:
        The bytes; None where the kernel does not say.
    """
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
        groups = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    free = [] if found is None else [int(found[1]) * 1024]
    for line in groups:  # number:controllers:path; version 2 has no controllers
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = _CGROUP_FILES["memory" if controllers else ""]
        for mounted in (cgroups / "memory",) if controllers else (cgroups, cgroups / "unified"):
            inside = mounted / path.lstrip("/")
            free += filter(None, (_free_in_group(group, *names) for group in (inside, *inside.parents)))
    return min(free, default=None)


def _free_in_group(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Return the bytes that a control group can still take; None where it has no limit."""
    try:
        free = int((group / limit).read_text()) - int((group / usage).read_text())  # `max` is no number
        match = re.search(rf"^{reclaimable} (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return max(1, free + (int(match[1]) if match else 0))


def memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """Return how many processes the kernel has killed for lack of memory since it started; None where it hides that."""
    try:
        match = re.search(r"^oom_kill (\d+)", vmstat.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def _nvidia_smi(field: str) -> list[str]:
    """Return a field of every GPU as nvidia-smi says it; nothing where it does not run."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return []


def native_formats(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Return what the devices of this machine multiply natively.

    Args:
        cpuinfo: The kernel's description of the CPU, which counts where this process sees no GPU.

    Returns:
        `devices`: "GPUs" or "CPU"; `bf16`, `fp16`, `fp8`: True or False, None where it is not known (fp8: of CPUs).
    """
    known: dict[str, Any] = {"devices": "CPU", "bf16": None, "fp16": None, "fp8": None}
    if count_accelerators():
        known["devices"] = "GPUs"
        versions = [float(word) for word in _nvidia_smi("compute_cap") if re.fullmatch(r"\d+\.\d+", word)]
        return known | {name: min(versions) >= least for name, least in LEAST_CAPABILITY.items() if versions}
    try:
        flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        flags = None
    return known | {name: bool(native & {*flags[1].split()}) for name, native in _CPU_FLAGS.items() if flags}


def port_problem(port: int) -> str | None:
    """Return why a TCP port of this machine cannot be listened on, or None where it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.strerror or str(error)
    return None
