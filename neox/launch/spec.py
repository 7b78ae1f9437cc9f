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

SlotId = int | str  # an index, or a device's UUID where CUDA_VISIBLE_DEVICES names devices so


@dataclass(frozen=True)
class Host:
    """One machine and its slots: the accelerators, or without any the CPU ranks, to use on it."""

    name: str
    slots: tuple[SlotId, ...]


@dataclass(frozen=True)
class LaunchSpec:
    """One run.

    Attributes:
        run_id: A name that no other run has.
        hosts: Hosts and slots, in rank order.
        master_addr: Address of the rendezvous.
        master_port: Port of the rendezvous.
        script: Absolute path of the script that ranks run.
        arguments: Its arguments.
        directory: Working directory of the ranks.
        code_root: Directory that holds the package `neox`, the same path on every host.
        run_directory: Directory of the run's logs.
        python: The interpreter, the same path on every host.
        environment: Variables of the ranks. No secrets: this object is seen in lists of processes.
        hang_timeout: Seconds without progress after which the run is ended; None for never.
        stop_timeout: Seconds that ranks have to end by themselves after SIGTERM.
        stdin: File that rank 0 reads as its standard input, on one machine.
        reserved: Directories that no other run may use meanwhile.
        rank_bytes: The plan's estimate of the memory of the fullest rank, for messages; None where it is not known.
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
    hang_timeout: float | None = None
    stop_timeout: float = 60.0
    stdin: str | None = None
    reserved: tuple[str, ...] = ()
    rank_bytes: int | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks over all hosts."""
        return sum(len(host.slots) for host in self.hosts)

    def first_rank(self, node_rank: int) -> int:
        """Return the global rank of the first process on a host."""
        return sum(len(host.slots) for host in self.hosts[:node_rank])

    def host_of(self, rank: int) -> Host:
        """Return the host that a global rank runs on."""
        for number, host in enumerate(self.hosts):
            if rank < self.first_rank(number) + len(host.slots):
                return host
        raise IndexError(rank)

    @property
    def world_info(self) -> str:
        """The hosts in the form that DeepSpeed's launcher takes."""
        return base64.urlsafe_b64encode(_json({host.name: list(host.slots) for host in self.hosts})).decode()

    def encode(self) -> str:
        """Encode as base64 of compressed JSON, which no shell interprets."""
        fields = {**vars(self), "hosts": [vars(host) for host in self.hosts]}
        return base64.urlsafe_b64encode(zlib.compress(_json(fields))).decode()

    @staticmethod
    def decode(text: str) -> LaunchSpec:
        """Return the specification that `encode` encoded.

        Raises:
            LaunchError: The text is none.
        """
        try:
            data: dict[str, Any] = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
            hosts = tuple(Host(host["name"], tuple(host["slots"])) for host in data.pop("hosts"))
            data |= {key: tuple(data[key]) for key in ("arguments", "reserved")}
            return LaunchSpec(hosts=hosts, **data)
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise LaunchError(f"the launch specification cannot be read ({error}): was the command cut off?") from None


def new_run_id() -> str:
    """Return a name that no other run has on any host."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{os.urandom(3).hex()}"


def code_root() -> Path:
    """Return the directory that holds the package `neox`."""
    return Path(__file__).resolve().parents[2]


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
