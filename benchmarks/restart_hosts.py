"""Time from the death of a rank or a host to the next step, over ssh, with and without warm processes.

    benchmarks/restart_hosts.py [--rounds 3] [--code DIRECTORY ...] [--out FILE.json]

Three network namespaces stand for hosts (needs root, pdsh and sshd): two with one CPU rank each, and a spare one. The
run saves every 20 steps. When the warm processes are ready, either rank 1 is killed, or all processes of its host are
killed and its network is cut, which ssh notices immediately. The sides take turns:

- `warm`: this checkout as it is;
- `cold`: the same, but the warm processes are killed first, so that the new ranks have to import;
- each `--code DIRECTORY`: another checkout of this project.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.soak_training import wait
from neox.launch.agent.warm_start import WAITING_NAME
from neox.launch.processes import is_alive
from neox.run_events import read_events
from tests.end_to_end.launched_runs import ROOT, command_line, write_config
from tests.end_to_end.network_namespaces import TwoMachines, two_machines, why_not

STEPS = 100_000
KILL_AFTER = 50
FAULTS = ("rank", "host")
DATA = ROOT / "tests" / "golden" / "data" / "small_text_document"


class HostsRun:
    """A training on two hosts and a spare one, launched on the first.

    Args:
        machines: The hosts.
        directory: Directory of the run.
        spare: Address of the third host.
        code: Checkout whose `deepy.py` is used.
    """

    def __init__(self, machines: TwoMachines, directory: Path, spare: str, code: Path) -> None:
        self.machines = machines
        self.directory = directory / "run"
        first, second = machines.hosts
        hostfile = directory / "hostfile"
        hostfile.write_text(f"{first} slots=1\n{second} slots=1\n{spare} slots=1 spare\n")
        write_config(directory / "tiny.yml", self.directory, None)
        keys = {"data_path": DATA, "save": directory / "save", "checkpoint_factor": 20, "keep_last_n_checkpoints": 2}
        keys |= {"train_iters": STEPS, "lr_decay_iters": STEPS, "eval_interval": STEPS, "eval_iters": 1}
        keys |= {"doctor_timeout": 60, "max_restarts": 9}
        settings = []
        for key, value in keys.items():
            settings += ["--set", f"{key}={value}"]
        command = [sys.executable, str(code / "deepy.py"), str(code / "train.py"), str(directory / "tiny.yml")]
        command += ["-H", str(hostfile), *settings]
        environment = {**os.environ, **machines.environment, "PYTHONPATH": str(code), "CUDA_VISIBLE_DEVICES": ""}
        self.log = directory / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                machines.inside(command),
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def has_ended(self) -> bool:
        """Return whether the launcher has ended."""
        return self.process.poll() is not None

    def steps(self) -> int:
        """Return the number of trained steps, including repeated ones."""
        path = self.directory / "metrics.jsonl"
        return path.read_bytes().count(b"train/lm_loss") if path.exists() else 0

    def warm_processes(self) -> list[int]:
        """Return the processes that wait to become ranks."""
        return [pid for pid in self.machines.pids() if _name(pid) == WAITING_NAME]

    def kill(self, fault: str) -> None:
        """Kill rank 1, or its host."""
        name = self.machines.names[1]
        pids = self.machines.pids([name])
        if fault == "rank":
            ranks = [pid for pid in pids if "bootstrap" in command_line(pid) and _name(pid) not in _WARM_NAMES]
            os.kill(ranks[0], signal.SIGKILL)
            return
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        # Their connections must be closed before the cable is cut; otherwise ssh notices it after 25 s of silence.
        wait(lambda: not any(map(is_alive, pids)), "death of the processes")
        subprocess.run(["ip", "-n", name, "link", "set", "eth0", "down"], check=True)

    def end(self) -> None:
        """Kill the launcher, and wait until no process is left."""
        self.process.kill()
        self.process.wait()
        wait(lambda: not self.machines.pids(), "end of all processes")


_WARM_NAMES = (WAITING_NAME, "neox-import")


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def measure(work: Path, side: str, fault: str) -> dict[str, float]:
    """Return the seconds from the fault to the next step, and their parts."""
    code = ROOT if side in ("warm", "cold") else Path(side)
    (work / "machines").mkdir(parents=True)
    with two_machines(work / "machines") as machines:
        run = HostsRun(machines, work, machines.add_third_machine(), code)
        try:
            wait(lambda: run.steps() >= KILL_AFTER or run.has_ended(), "steps")
            if code == ROOT:
                wait(lambda: len(run.warm_processes()) == 3 or run.has_ended(), "warm processes")
            if side == "cold":
                for pid in run.warm_processes():
                    os.kill(pid, signal.SIGKILL)
            killed = time.time()
            run.kill(fault)
            time.sleep(0.3)  # steps that were in progress are in the metrics by then
            steps = run.steps()
            wait(lambda: run.steps() > steps or run.has_ended(), "next step")
            if run.has_ended():
                raise RuntimeError(f"the run ended: {run.log.read_text()[-3000:]}")
            now = time.time()
            events = read_events(run.directory)
            end = next(event["time"] for event in events if event["event"] == "end")
            start = [event["time"] for event in events if event["event"] == "start"][-1]
            return {"all": now - killed, "noticing": end - killed, "planning": start - end, "ranks": now - start}
        finally:
            run.end()


def compare(rounds: int, sides: Sequence[str], report: Callable[[str], None]) -> dict[str, Any]:
    """Let the sides take turns, and return the medians and all measurements."""
    measurements: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds):
        for fault in FAULTS:
            for side in sides:
                with tempfile.TemporaryDirectory() as directory:
                    seconds = measure(Path(directory), side, fault)
                measurements.setdefault(f"{fault}, {side}", []).append(seconds)
                report(f"{number} {fault}, {side}: {seconds}")
    medians = {}
    for name, group in measurements.items():
        medians[name] = {part: round(median(each[part] for each in group), 2) for part in group[0]}
    return {"medians": medians, "all": measurements}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="number of turns of each side (default: 3)")
    parser.add_argument("--code", action="append", default=[], help="another checkout to compare with; may be repeated")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    numbers = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "load_before": os.getloadavg()}
    numbers |= compare(arguments.rounds, ["warm", "cold", *arguments.code], lambda line: print(line, flush=True))
    numbers["load_after"] = os.getloadavg()
    print(json.dumps(numbers["medians"], indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
