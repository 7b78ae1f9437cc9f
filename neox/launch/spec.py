"""Specification of a run: what every host must know, encoded as base64 for shells and ssh."""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neox.errors import LaunchError

SlotId = int | str  # an index, or a device's UUID if CUDA_VISIBLE_DEVICES names devices by UUID


@dataclass(frozen=True)
class Host:
    """One machine and the slots to use on it: its accelerators, or numbers of CPU ranks if it has none.

    Attributes:
        name: Name or address.
        slots: Slots that ranks use.
        spare: Whether it is only used in place of a host that cannot take part.
    """

    name: str
    slots: tuple[SlotId, ...]
    spare: bool = False


@dataclass(frozen=True)
class LaunchSpec:
    """One run.

    Attributes:
        run_id: Unique name of the run.
        hosts: Hosts and slots, in rank order.
        master_addr: Address of the rendezvous.
        master_port: Port of the rendezvous.
        script: Absolute path of the script that ranks run.
        arguments: Its arguments.
        directory: Working directory of the ranks.
        code_root: Directory that holds the package `neox`, the same path on every host.
        run_directory: Directory of the run's logs.
        python: The interpreter, the same path on every host.
        environment: Variables of the ranks, without secrets, because lists of processes show this object.
        of_hosts: Values of variables as DeepSpeed's files hold them, which each host completes with its own variables.
        hang_timeout: Seconds without progress after which the run is ended; None for never.
        stop_timeout: Seconds that ranks have to end by themselves after SIGTERM.
        answers_interrupts: Whether the script handles Ctrl-C and continues. Two within a second end the run.
        stdin: File that rank 0 reads as its standard input, if all ranks are on this machine.
        reserved: Directories that no other run may use while this one runs.
        preemption_command: Shell command that succeeds on a host that is about to be preempted; None for none.
        preemption_file: File that appears on such a host; None for none.
        preemption_seconds: Seconds between two checks for a preemption notice.
        rank_bytes: The plan's estimate of the memory of the fullest rank, for messages; None if it is not known.
        warm_module: Module that warm processes import during the run, so that they can become the ranks of its next
            start. The agents then stay after a failure, and wait for that start. None if agents end with their ranks.
        spares: Hosts without ranks, whose agents wait with warm processes. Their numbers follow those of `hosts`.
    """

    run_id: str
    hosts: tuple[Host, ...]
    master_addr: str
    master_port: int
    script: str
    arguments: tuple[str, ...]
    directory: str
    code_root: str
    run_directory: str
    python: str
    environment: Mapping[str, str] = field(default_factory=dict)
    of_hosts: Mapping[str, str] = field(default_factory=dict)
    hang_timeout: float | None = None
    stop_timeout: float = 60.0
    answers_interrupts: bool = False
    stdin: str | None = None
    reserved: tuple[str, ...] = ()
    rank_bytes: int | None = None
    preemption_command: str | None = None
    preemption_file: str | None = None
    preemption_seconds: float = 5.0
    warm_module: str | None = None
    spares: tuple[Host, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts."""
        return self.first_rank(len(self.hosts))

    @property
    def hosts_with_agents(self) -> tuple[Host, ...]:
        """Hosts with an agent by their number: those with ranks, then spare ones."""
        return (*self.hosts, *self.spares)

    @property
    def host_names(self) -> list[str]:
        """Names of the hosts with ranks, by their number."""
        return [host.name for host in self.hosts]

    def node_rank_of(self, name: str) -> int | None:
        """Return the number of the host with a name; None if there is none."""
        for number, host in enumerate(self.hosts_with_agents):
            if host.name == name:
                return number
        return None

    def first_rank(self, node_rank: int) -> int:
        """Return the global rank of the first process on a host."""
        return sum(len(host.slots) for host in self.hosts[:node_rank])

    def host_of(self, rank: int) -> Host:
        """Return the host that a global rank runs on."""
        end = 0
        for host in self.hosts:
            end += len(host.slots)
            if rank < end:
                return host
        raise IndexError(rank)

    def log_path(self, rank: int) -> Path:
        """Return the path of a rank's log, on the host that the rank runs on."""
        return self.log_directory(self.host_of(rank)) / f"rank_{rank:04d}.log"

    def log_directory(self, host: Host) -> Path:
        """Return the directory of the logs of a host's ranks."""
        return Path(self.run_directory) / "ranks" / host.name

    @property
    def world_info(self) -> str:
        """The hosts in the form that DeepSpeed's launcher takes."""
        slots = {host.name: list(host.slots) for host in self.hosts}
        return base64.urlsafe_b64encode(_json(slots)).decode()

    def encode(self) -> str:
        """Encode as compressed JSON in base64, which needs no quotes in a shell."""
        fields = dict(vars(self))
        fields["hosts"] = [vars(host) for host in self.hosts]
        fields["spares"] = [vars(host) for host in self.spares]
        return base64.urlsafe_b64encode(zlib.compress(_json(fields))).decode()

    @staticmethod
    def decode(text: str) -> LaunchSpec:
        """Decode the text that `encode` returned.

        Raises:
            LaunchError: The text is not a specification.
        """
        try:
            data: dict[str, Any] = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
            hosts = _decode_hosts(data.pop("hosts"))
            spares = _decode_hosts(data.pop("spares"))
            arguments = tuple(data.pop("arguments"))
            reserved = tuple(data.pop("reserved"))
            return LaunchSpec(hosts=hosts, spares=spares, arguments=arguments, reserved=reserved, **data)
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise LaunchError(f"the launch specification cannot be read ({error}): was the command cut off?") from None


def _decode_hosts(encoded: list[dict[str, Any]]) -> tuple[Host, ...]:
    return tuple(Host(host["name"], tuple(host["slots"])) for host in encoded)


def new_run_id() -> str:
    """Return a unique name for a run."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{os.urandom(3).hex()}"


def code_root() -> Path:
    """Return the directory that holds the package `neox`."""
    return Path(__file__).resolve().parents[2]


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
