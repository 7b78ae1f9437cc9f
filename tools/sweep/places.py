"""Places of runs: the slots of a host that one run of a sweep takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from neox.errors import ConfigError
from neox.launch.commands import more_ssh_options, ssh_command
from neox.launch.hosts.hostfile import is_this_machine, read_hostfile
from neox.launch.spec import Host

OTHER_HOST_KEYS = ("num_gpus", "num_nodes", "global_num_gpus", "exclude")
"""Keys of a configuration that choose hosts or slots, too. A place decides instead of them."""


@dataclass(frozen=True)
class Place:
    """Slots of one host, or several whole hosts, on which one run at a time is trained.

    Attributes:
        host: The host with these slots; None for all hosts of the hostfile, or those of the configuration itself.
        hostfile: File that names the host; empty for the hosts of the configuration.
        spare: Whether it is used only once another host is lost.
        imagined: Numbers of hosts, and of GPUs of each, that need not exist: a run can be planned there, and not
            trained. None for hosts that exist.
    """

    host: Host | None = None
    hostfile: str = ""
    spare: bool = False
    imagined: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """Name of its host; empty if it has no single one."""
        return "" if self.host is None else self.host.name

    @property
    def flags(self) -> list[str]:
        """Flags with which `deepy.py` uses this place and no other."""
        if self.imagined is not None:
            hosts, gpus = self.imagined
            return ["--hosts", str(hosts), "--gpus", str(gpus), "--set", "global_num_gpus=null"]
        if self.host is None and self.hostfile:
            return ["-H", self.hostfile]
        if self.host is None:
            return []
        slots = ",".join(map(str, self.host.slots))
        flags = ["-H", self.hostfile, "--include", f"{self.host.name}:{slots}"]
        for key in OTHER_HOST_KEYS:
            flags += ["--set", f"{key}=null"]
        return flags

    def asking_command(self, environment: Mapping[str, str]) -> list[str] | None:
        """Return a command that succeeds if the host answers; None if it is this machine."""
        if self.host is None or is_this_machine(self.host.name):
            return None
        return ssh_command(self.host, ["true"], None, more_ssh_options(environment))


def find_places(hostfile: str | None, slots_per_run: int | None) -> tuple[Place, ...]:
    """Return the places of a hostfile: one for each host, or one for each `slots_per_run` slots of a host.

    Args:
        hostfile: The hostfile; None for a single place, which the configuration chooses.
        slots_per_run: Number of slots of each run; None for all slots of a host.

    Raises:
        ConfigError: The hostfile cannot be read, or runs would have different numbers of ranks.
    """
    if hostfile is None:
        if slots_per_run is not None:
            raise ConfigError("slots_per_run divides the hosts of a hostfile: give one with -H")
        return (Place(),)
    return places_on(read_hostfile(hostfile), hostfile, slots_per_run)


def places_on(hosts: Sequence[Host], hostfile: str, slots_per_run: int | None) -> tuple[Place, ...]:
    """Return the places on hosts of a hostfile: one for each host, or one for each `slots_per_run` slots of a host.

    Args:
        hosts: The hosts, with the slots that may be used.
        hostfile: The hostfile.
        slots_per_run: Number of slots of each run; None for all slots of a host.

    Raises:
        ConfigError: Runs would have different numbers of ranks, or no host has so many slots.
    """
    sizes = {len(host.slots) for host in hosts}
    if slots_per_run is None and len(sizes) > 1:
        counts = ", ".join(f"{host.name} {len(host.slots)}" for host in hosts)
        raise ConfigError(
            f"hostfile {hostfile}: the hosts have different numbers of slots ({counts}), so that runs would train with "
            "different batches; set slots_per_run in the sweep file, or change the hostfile"
        )
    places: list[Place] = []
    for host in hosts:
        places += _divided(host, hostfile, slots_per_run)
    if all(place.spare for place in places):
        raise ConfigError(f"hostfile {hostfile}: no host has {slots_per_run} slots (slots_per_run)")
    return tuple(places)


def _divided(host: Host, hostfile: str, slots_per_run: int | None) -> Iterator[Place]:
    """Yield the places of a host. Slots that are left over are not used."""
    size = slots_per_run or len(host.slots)
    for first in range(0, len(host.slots) - size + 1, size):
        yield Place(Host(host.name, host.slots[first : first + size]), hostfile, host.spare)
