"""Choice of the hosts of a start: replacement by spare hosts, and the number of hosts that a smaller run can use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from neox.launch.spec import Host


@dataclass(frozen=True)
class ChosenHosts:
    """Hosts of one start.

    Attributes:
        hosts: The hosts, in the order of the hostfile. A spare host has the position of the host that it replaces.
        replaced: Name of the replaced host -> name of the spare host.
        missing: Hosts that are unusable and not replaced by a spare host.
    """

    hosts: tuple[Host, ...]
    replaced: Mapping[str, str]
    missing: tuple[Host, ...]


def choose_fit_hosts(hosts: Sequence[Host], spares: Sequence[Host], unfit: Mapping[str, str]) -> ChosenHosts:
    """Choose the hosts of a start.

    Args:
        hosts: Hosts of the hostfile that are not spare.
        spares: Spare hosts. Each can replace a host with at most as many slots.
        unfit: Names of the unusable hosts, with the reasons.
    """
    free = [spare for spare in spares if spare.name not in unfit]
    chosen: list[Host] = []
    missing: list[Host] = []
    replaced: dict[str, str] = {}
    for host in hosts:
        if host.name not in unfit:
            chosen.append(host)
            continue
        spare = next((spare for spare in free if len(spare.slots) >= len(host.slots)), None)
        if spare is None:
            missing.append(host)
            continue
        free.remove(spare)
        replaced[host.name] = spare.name
        chosen.append(Host(spare.name, spare.slots[: len(host.slots)]))
    return ChosenHosts(tuple(chosen), replaced, tuple(missing))


def most_usable_hosts(
    hosts: Sequence[Host],
    ranks_per_copy: int,
    samples_per_copy: int,
    batch_sizes: Sequence[int],
    *,
    copies_at_once: int = 1,
) -> tuple[Host, ...]:
    """Return the first hosts, as many as possible, on which data ranks can share all batches by accumulation.

    Args:
        hosts: Hosts that can take part.
        ranks_per_copy: Number of ranks that hold one copy of the network: pipeline x tensor x context ranks.
        samples_per_copy: Number of samples in a micro batch.
        batch_sizes: Numbers of samples that must be divisible, such as those of a step.
        copies_at_once: Number of copies of the network that belong together. The total must be a multiple of it.

    Returns:
        The hosts; empty if no number of them works.
    """
    for count in range(len(hosts), 0, -1):
        ranks = sum(len(host.slots) for host in hosts[:count])
        copies = ranks // ranks_per_copy
        if copies == 0 or ranks % ranks_per_copy or copies % copies_at_once:
            continue
        samples_at_once = copies * samples_per_copy
        if all(size % samples_at_once == 0 for size in batch_sizes):
            return tuple(hosts[:count])
    return ()
