"""A slurm of our own on this machine: munged, slurmctld, and a slurmd for each node. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue", "srun")
NODES = ("n1", "n2", "n3")
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
MpiDefault=none
"""


def why_not() -> str:
    """Return why no slurm can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "slurm's daemons are started as root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)"
    return ""


class SlurmCluster:
    """The running cluster.

    Args:
        directory: Directory of its files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def call(self, *command: str, cwd: Path | None = None) -> str:
        """Run a program of slurm, and return what it prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True, cwd=cwd)
        return done.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """Return a field of a job, as `scontrol show job` names it."""
        fields = self.call("scontrol", "show", "job", job).split()
        return next(field.partition("=")[2] for field in fields if field.startswith(f"{name}="))

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon, and everything that it has started."""
        daemon = self.nodes.pop(name)
        daemon.send_signal(signal.SIGSTOP)
        for pid in _processes_of(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.kill()
        daemon.wait()


@contextmanager
def slurm_cluster(directory: Path) -> Iterator[SlurmCluster]:
    """Start the daemons, and end them with everything that they have started."""
    cluster = SlurmCluster(directory)
    (directory / "state").mkdir(parents=True)
    port, *node_ports = _free_ports(1 + len(NODES))
    lines = [_CONFIGURATION.format(port=port, directory=directory)]
    for name, node_port in zip(NODES, node_ports, strict=True):
        lines.append(
            f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname=localhost Port={node_port} CPUs=1 RealMemory=1000\n"
        )
    lines.append(f"PartitionName=main Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP\n")
    (directory / "slurm.conf").write_text("".join(lines))
    with ExitStack() as daemons:
        daemons.callback(_kill_all, directory)
        daemons.enter_context(_daemon(_munged(directory), cluster.environment))
        wait(lambda: (directory / "munge" / "socket").exists(), "munged")
        daemons.enter_context(_daemon(["slurmctld", "-D"], cluster.environment))
        for name in NODES:
            cluster.nodes[name] = daemons.enter_context(_daemon(["slurmd", "-D", "-N", name], cluster.environment))
        wait(lambda: _idle_nodes(cluster) == len(NODES), "nodes")
        yield cluster


def wait(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds:.0f} s"
        time.sleep(0.2)


def _munged(directory: Path) -> list[str]:
    """Write a key, and return the command of munged, which wants its files to be out of the reach of others."""
    munge = directory / "munge"
    munge.mkdir(mode=0o755)
    key = munge / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={munge / name}" for option, name in files.items()]
    return ["munged", "--foreground", "--force", *options]


@contextmanager
def _daemon(command: Sequence[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _idle_nodes(cluster: SlurmCluster) -> int:
    try:
        return len(cluster.call("sinfo", "--noheader", "--states=idle", "--Node", "--format=%N").split())
    except subprocess.CalledProcessError:  # slurmctld is not up yet
        return 0


def _processes_of(name: str) -> list[int]:
    """Return the processes that a node has started, and their daemons of slurm."""
    found = []
    for pid, variables in variables_of_processes():
        if f"SLURMD_NODENAME={name}" in variables:
            found += [pid, _parent(pid)]
    own = os.getpid()
    return [pid for pid in dict.fromkeys(found) if pid not in (1, own)]


def _kill_all(directory: Path) -> None:
    """Kill all processes that know this cluster."""
    for pid, variables in variables_of_processes():
        if f"SLURM_CONF={directory / 'slurm.conf'}" in variables and pid != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def variables_of_processes() -> Iterator[tuple[int, list[str]]]:
    """Yield each process of this machine with the variables that it was started with."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                yield int(entry.name), (entry / "environ").read_text(errors="replace").split("\0")


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 1


def _free_ports(count: int) -> list[int]:
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]
