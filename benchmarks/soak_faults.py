"""Faults that benchmarks/soak.py injects. Each is a function that returns whether the fault took place."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.soak_hosts import HostsTraining
from benchmarks.soak_training import Training, kill_process, wait

LOCAL_FAULTS = ("rank", "rank", "rank", "set-up", "agent", "launcher", "flip", "full", "stop", "stop-agent", "slow")
HOST_FAULTS = ("rank", "set-up", "agent", "stop-agent", "launcher", "cut", "cut", "cut")
_LISTEN = "0A"  # the kernel's number for the state of a listening socket


def _kill_rank(training: Training, generator: random.Random) -> bool:
    ranks = training.pids("rank")
    return bool(ranks) and kill_process(generator.choice(ranks), signal.SIGKILL)


def _kill_in_set_up(training: Training, generator: random.Random) -> bool:
    """Kill a rank. After the restart kill another one while the ranks set up their process groups.

    A rank listens for connections from the moment when it opens the store of the first group. The end event shows
    whether the second kill came before the first step.
    """
    if not _restart_by_kill(training, generator):
        return False
    wait(lambda: any(map(listens, training.pids("rank"))) or training.ended(), "set-up of process groups")
    time.sleep(generator.uniform(0, 0.2))
    ends = len(training.ends())
    if not _kill_rank(training, generator):
        return False
    wait(lambda: len(training.ends()) > ends or training.ended(), "end after the second kill")
    return len(training.ends()) > ends and training.ends()[ends]["step"] is None


def listens(pid: int) -> bool:
    """Return whether a process has a TCP socket on which it accepts connections."""
    with contextlib.suppress(OSError):  # it has ended
        links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
        inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()  # sl local remote state queues timer repeats uid timeout inode
                if fields[3] == _LISTEN and fields[9] in inodes:
                    return True
    return False


def _kill_agent(training: Training, generator: random.Random) -> bool:
    agents = training.host_agents()
    return bool(agents) and kill_process(generator.choice(agents), signal.SIGKILL)


def _stop_agent(training: Training, generator: random.Random) -> bool:
    agents = training.host_agents()
    return bool(agents) and kill_process(generator.choice(agents), signal.SIGSTOP)


def _kill_launcher(training: Training, _: random.Random) -> bool:
    assert training.process is not None
    return kill_process(training.process.pid, signal.SIGKILL)


def _stop_rank(training: Training, generator: random.Random) -> bool:
    ranks = training.pids("rank")
    return bool(ranks) and kill_process(generator.choice(ranks), signal.SIGSTOP)


def _flip_bit(training: Training, generator: random.Random) -> bool:
    """Stop the ranks, so that nothing is saved meanwhile; flip a bit of the newest checkpoint; kill a rank.

    With fewer than two checkpoints nothing is done: a run cannot resume if its only checkpoint is damaged.
    """
    ranks = training.pids("rank")
    for pid in ranks:
        kill_process(pid, signal.SIGSTOP)
    checkpoints = training.checkpoints()
    if not ranks or len(checkpoints) < 2:
        for pid in ranks:
            kill_process(pid, signal.SIGCONT)
        return False
    checkpoint = training.save / f"global_step{checkpoints[0]}"
    files = sorted(path for path in checkpoint.rglob("*.pt") if path.stat().st_size)
    path = generator.choice(files)
    with open(path, "r+b") as file:
        file.seek(generator.randrange(path.stat().st_size))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << generator.randrange(8)]))
    killed = kill_process(ranks[0], signal.SIGKILL)
    for pid in ranks[1:]:
        kill_process(pid, signal.SIGCONT)
    return killed


def _kill_on_slow_disk(training: Training, generator: random.Random) -> bool:
    """Kill a rank while each fsync takes longer, so that a save is in progress most of the time."""
    starts = len(training.starts())
    training.slow.touch()
    try:
        time.sleep(generator.uniform(0, 3))
        if not _kill_rank(training, generator):
            return False
        training.wait_for_start(starts, "restart on a slow disk")
        return True
    finally:
        training.slow.unlink()


def _fill_disk(training: Training, _: random.Random) -> bool:
    """Leave too little space for the next checkpoint. Return False if the checkpoints have no disk of their own."""
    disk_of_save = training.save.parent
    if not os.path.ismount(disk_of_save):
        return False
    with contextlib.suppress(OSError), open(_ballast(training), "wb") as file:  # a save may fill the disk first
        file.write(bytes(max(0, shutil.disk_usage(disk_of_save).free - 50_000)))
    return True


def _cut_off(training: Training, generator: random.Random) -> bool:
    """Unplug a host other than the launcher's, and plug it in again after the restart.

    If the run has shrunk to the launcher's host, first kill a rank, so that the restart brings the other host back.
    """
    assert isinstance(training, HostsTraining)
    if not training.other_hosts() and not _restart_by_kill(training, generator):
        return False
    others = training.other_hosts()
    if not others:
        return False
    starts = len(training.starts())
    host = generator.choice(others)
    training.set_link(host, "down")
    try:
        training.wait_for_start(starts, "restart without the host")
        return True
    finally:
        training.set_link(host, "up")


def _restart_by_kill(training: Training, generator: random.Random) -> bool:
    """Kill a rank and wait for the restart. Return whether the run restarted."""
    starts = len(training.starts())
    if not _kill_rank(training, generator):
        return False
    training.wait_for_start(starts, "restart")
    return not training.ended()


def _ballast(training: Training) -> Path:
    return training.save.parent / "ballast"


def free_disk(training: Training) -> None:
    """Undo the fault `full`: free the disk space that it has filled."""
    _ballast(training).unlink(missing_ok=True)


FUNCTIONS: dict[str, Callable[[Training, random.Random], bool]] = {
    "rank": _kill_rank,
    "set-up": _kill_in_set_up,
    "agent": _kill_agent,
    "launcher": _kill_launcher,
    "stop": _stop_rank,
    "flip": _flip_bit,
    "full": _fill_disk,
    "slow": _kill_on_slow_disk,
    "stop-agent": _stop_agent,
    "cut": _cut_off,
}
