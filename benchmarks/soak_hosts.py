"""Trainings of benchmarks/soak.py on several hosts, which are network namespaces of this machine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.soak_training import HOST_SCENARIOS, Training, has_role
from tests.end_to_end.network_namespaces import TwoMachines, two_machines


class HostsTraining(Training):
    """A training on two hosts with one rank each. A third host is a spare, unless the run is elastic.

    Args:
        directory: Directory for its configuration, logs and checkpoints, which the hosts share.
        scenario: Key in HOST_SCENARIOS.
        machines: The hosts.
    """

    def __init__(self, directory: Path, scenario: str, machines: TwoMachines) -> None:
        super().__init__(directory, scenario)
        self.machines = machines
        first, second = machines.hosts
        self._names = {first: machines.names[0], second: machines.names[1]}
        lines = [f"{first} slots=1", f"{second} slots=1"]
        if not HOST_SCENARIOS[scenario].get("elastic"):
            third = machines.add_third_machine()
            self._names[third] = machines.names[2]
            lines.append(f"{third} slots=1 spare")
        (directory / "hostfile").write_text("\n".join(lines) + "\n")
        config = directory / "soak.yml"
        keys = json.loads(config.read_text())
        del keys["num_gpus"]
        config.write_text(json.dumps(keys, indent=1))

    def command(self) -> list[str]:
        """Return the command of the launcher, on the first host."""
        return self.machines.inside([*super().command(), "-H", str(self.directory / "hostfile")])

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the launcher."""
        return super().environment() | self.machines.environment

    def pids(self, role: str | None = None) -> list[int]:
        """Return the live processes, with one role or all. Every process on the hosts counts, even without the mark."""
        on_hosts = [pid for pid in self.machines.pids() if role is None or has_role(pid, role)]
        return sorted({*super().pids(role), *on_hosts})

    def host_agents(self) -> list[int]:
        """Return the agents that have ranks of the newest start. A host that was cut off may still run an older one."""
        names = [self._names[host] for host in self.starts()[-1]["hosts"]]
        inside = self.machines.pids(names)
        return [pid for pid in super().host_agents() if pid in inside]

    def other_hosts(self) -> list[str]:
        """Return the hosts of the newest start, except the launcher's."""
        return [host for host in self.starts()[-1]["hosts"] if host != self.machines.hosts[0]]

    def set_link(self, host: str, state: str) -> None:
        """Connect a host to the network (`up`), or disconnect it (`down`)."""
        subprocess.run(["ip", "-n", self._names[host], "link", "set", "eth0", state], check=True)


@contextmanager
def open_training(directory: Path, scenario: str, disk: Path | None) -> Iterator[Training]:
    """Yield the training of a scenario. Afterwards, kill its remaining processes.

    Args:
        directory: Directory for its files.
        scenario: Key in SCENARIOS.
        disk: Directory for the checkpoints on a disk of its own; None to save in `directory`. Trainings on several
            hosts do not use it, because a host with a nearly full disk is left out.
    """
    if scenario in HOST_SCENARIOS:
        machines_directory = directory / "machines"
        machines_directory.mkdir(parents=True)
        with two_machines(machines_directory) as machines:
            training: Training = HostsTraining(directory, scenario, machines)
            try:
                yield training
            finally:
                training.end()
        return
    training = Training(directory, scenario, disk)
    try:
        yield training
    finally:
        training.end()
