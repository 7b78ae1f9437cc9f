"""What every host of one run must know, in one object that crosses shells and ssh as base64."""

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
    """One machine and the accelerators (or, without any, the CPU ranks) to use on it."""

    name: str
    slots: tuple[SlotId, ...]


@dataclass(frozen=True)
class LaunchSpec:
    """One run.

    script: absolute path; arguments: what every rank gets after it.
    directory: where ranks run; code_root: the checkout that holds `neox`, the same path on every host.
    environment: variables for the ranks; no secrets, because this object is seen in process lists.
    hang_timeout: seconds without progress after which a run is ended, None for never.
    stdin: file that rank 0 reads as its standard input, on one machine.
    stop_timeout: seconds that ranks have to end by themselves after SIGTERM.
    reserved: directories that no other run may use meanwhile.
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

    @property
    def world_size(self) -> int:
        """Number of ranks over all hosts."""
        return sum(len(host.slots) for host in self.hosts)

    def first_rank(self, node_rank: int) -> int:
        """Global rank of the first process on a host."""
        return sum(len(host.slots) for host in self.hosts[:node_rank])

    def host_of(self, rank: int) -> Host:
        """The host a global rank runs on."""
        for number, host in enumerate(self.hosts):
            if rank < self.first_rank(number) + len(host.slots):
                return host
        raise IndexError(rank)

    @property
    def world_info(self) -> str:
        """The hosts in the form that DeepSpeed's launcher takes."""
        return base64.urlsafe_b64encode(_json({host.name: list(host.slots) for host in self.hosts})).decode()

    def encode(self) -> str:
        """Write as base64 of compressed JSON: letters that no shell looks at."""
        fields = {**vars(self), "hosts": [vars(host) for host in self.hosts]}
        return base64.urlsafe_b64encode(zlib.compress(_json(fields))).decode()

    @staticmethod
    def decode(text: str) -> LaunchSpec:
        """Read what `encode` wrote."""
        try:
            data: dict[str, Any] = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
            hosts = tuple(Host(host["name"], tuple(host["slots"])) for host in data.pop("hosts"))
            data |= {key: tuple(data[key]) for key in ("arguments", "reserved")}
            return LaunchSpec(hosts=hosts, **data)
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise LaunchError(f"the launch specification cannot be read ({error}): was the command cut off?") from None


def new_run_id() -> str:
    """A name for one launch, unique on every host."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{os.urandom(3).hex()}"


def code_root() -> Path:
    """The directory that holds the `neox` package."""
    return Path(__file__).resolve().parents[2]


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
