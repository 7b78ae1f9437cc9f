"""Two machines on one: network namespaces joined by a virtual cable, an sshd in each, pdsh between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from neox.launch.processes import is_alive


def why_not() -> str | None:
    """What keeps this machine from running such tests, None when nothing does."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    missing = [name for name in ("ip", "pdsh", "ssh", "sshd", "ssh-keygen") if _find(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: iproute2, pdsh, openssh-client, openssh-server)"
    probe = f"neoxprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"cannot make network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


class TwoMachines:
    """`hosts` are their addresses; `inside` makes a command run on one of them."""

    def __init__(self, directory: Path, subnet: str) -> None:
        self.directory = directory
        self.hosts = (f"{subnet}.1", f"{subnet}.2")
        self.names: tuple[str, ...] = tuple(f"neox{os.getpid()}n{number}" for number in (1, 2))
        self.daemons: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """What ssh, pdsh and gloo need to find one another."""
        return {
            "PDSH_SSH_ARGS_APPEND": f"-F{self.directory / 'ssh_config'}",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }

    def inside(self, command: Sequence[str], number: int = 0) -> list[str]:
        """A command as run on one of the machines."""
        return ["ip", "netns", "exec", self.names[number], *command]

    def pids(self, names: Sequence[str] | None = None) -> list[int]:
        """Processes on the named machines, or all, the listening sshd daemons left out."""
        found: list[int] = []
        for name in self.names if names is None else names:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
            found += map(int, listed.stdout.split())
        return [pid for pid in found if pid not in {daemon.pid for daemon in self.daemons} and is_alive(pid)]

    def add_machine(self, number: int, *, instead: Path, of: Path) -> str:
        """Give the second machine another address, whose sshd sees the directory `instead` in place of `of`."""
        address = f"{self.hosts[1].removesuffix('2')}{number}"
        _ip("-n", self.names[1], "addr", "add", f"{address}/24", "dev", "eth0")
        sshd = [*self._sshd(), f"-oListenAddress={address}"]
        hide = 'mount --bind "$0" "$1" && shift && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", hide, str(instead), str(of), *sshd]
        self.daemons.append(subprocess.Popen(self.inside(command, 1), stderr=subprocess.DEVNULL))
        self.wait_for(address)
        return address

    def add_third_machine(self) -> str:
        """Make a third machine with a cable to the first, and return its address. The second does not reach it."""
        name = f"neox{os.getpid()}n3"
        address = f"{self.hosts[0].removesuffix('1')}9"
        _ip("netns", "add", name)
        self.names = (*self.names, name)
        ends = (f"nv{os.getpid()}", f"nw{os.getpid()}")
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, owner, device in zip(ends, (self.names[0], name), ("eth1", "eth0"), strict=True):
            _ip("link", "set", end, "netns", owner)
            _ip("-n", owner, "link", "set", end, "name", device)
            _ip("-n", owner, "link", "set", device, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", self.names[0], "route", "add", f"{address}/32", "dev", "eth1", "src", self.hosts[0])
        daemon = self.inside([*self._sshd(), f"-oListenAddress={address}"], 2)
        self.daemons.append(subprocess.Popen(daemon, stderr=subprocess.DEVNULL))
        self.wait_for(address)
        return address

    def set_up(self) -> None:
        """Make the cable, the keys and the daemons."""
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", f"nx{os.getpid()}", "type", "veth", "peer", "name", f"ny{os.getpid()}")
        for cable, name, address in zip((f"nx{os.getpid()}", f"ny{os.getpid()}"), self.names, self.hosts, strict=True):
            _ip("link", "set", cable, "netns", name)
            _ip("-n", name, "link", "set", cable, "name", "eth0")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        for key in ("host_key", "user_key"):
            path = str(self.directory / key)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        shutil.copy(self.directory / "user_key.pub", self.directory / "authorized_keys")
        self._configure()
        Path("/run/sshd").mkdir(exist_ok=True)
        for number, address in enumerate(self.hosts):
            daemon = self.inside([*self._sshd(), f"-oListenAddress={address}"], number)
            self.daemons.append(subprocess.Popen(daemon, stderr=subprocess.DEVNULL))
        for address in self.hosts:
            self.wait_for(address)

    def _sshd(self) -> list[str]:
        return [_find("sshd") or "sshd", "-D", "-e", "-f", str(self.directory / "sshd_config")]

    def _configure(self) -> None:
        (self.directory / "sshd_config").write_text(
            f"HostKey {self.directory}/host_key\nAuthorizedKeysFile {self.directory}/authorized_keys\n"
            "PermitRootLogin yes\nPasswordAuthentication no\nStrictModes no\nUsePAM no\nPidFile none\n"
            "MaxStartups 100\nMaxSessions 100\n"
            "SetEnv CUDA_VISIBLE_DEVICES=\n"  # CPU ranks, on a machine with GPUs too
        )
        (self.directory / "ssh_config").write_text(
            f"Host *\n  IdentityFile {self.directory}/user_key\n  IdentitiesOnly yes\n  User root\n"
            f"  StrictHostKeyChecking no\n  UserKnownHostsFile {self.directory}/known_hosts\n  LogLevel ERROR\n"
        )

    def wait_for(self, address: str) -> None:
        """Wait until a machine answers, which takes a moment after its cable was plugged in."""
        command = ["ssh", "-F", str(self.directory / "ssh_config"), "-oConnectTimeout=2", address, "true"]
        for _ in range(50):
            if subprocess.run(self.inside(command), capture_output=True).returncode == 0:
                return
            time.sleep(0.1)
        raise RuntimeError(f"sshd on {address} does not answer")

    def tear_down(self) -> None:
        """End what `set_up` started, and whatever still runs in the namespaces."""
        for name in self.names:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for daemon in self.daemons:
            daemon.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextlib.contextmanager
def two_machines(directory: Path) -> Iterator[TwoMachines]:
    """Two machines for the time of a `with` block."""
    machines = TwoMachines(directory, f"10.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}")
    try:
        machines.set_up()
        yield machines
    finally:
        machines.tear_down()


def _find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
