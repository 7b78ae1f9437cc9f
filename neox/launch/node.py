"""The agent of one host: starts DeepSpeed's launcher there, watches the ranks, and ends them together.

`python -m neox.launch.node SPEC --node_rank N [--lifeline] [--plain]`. Its standard output carries events
(`neox.launch.events`) to the head process. Nothing of a run outlives it: it kills the ranks when the first of them
fails, when the head process or the ssh connection ends (`--lifeline`: end of standard input, output that cannot be
written, a network that is cut), or when nothing moved for `hang_timeout`. SIGTERM and SIGINT pass on to the ranks:
those that answer (`acknowledge_stop`) or are saving just then have `stop_timeout`; those that neither answer nor end
are killed after five seconds. SIGUSR1 shows every rank's stacks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from neox.errors import LaunchError, run_script
from neox.launch.accelerators import count_accelerators
from neox.launch.commands import deepspeed_launch
from neox.launch.connection import follow_head, ssh_ports, unanswered
from neox.launch.environment import child_environment
from neox.launch.events import Event, LineBuffer, decode_event, encode_event, text_events
from neox.launch.extensions import break_stale_locks
from neox.launch.lifeline import exit_status, is_alive, parent_death_hook, signal_group
from neox.launch.plain import PlainOutput
from neox.launch.progress import RankActivity
from neox.launch.rendezvous import CPU_RANKS_VARIABLE, PROGRESS_VARIABLE, create_agent_directory
from neox.launch.run_lock import hold
from neox.launch.secrets import take_secrets
from neox.launch.spec import LaunchSpec
from neox.launch.stacks import answer

EXIT_HANG = 124
_POLL_SECONDS = 0.1
_HEARTBEAT_SECONDS = 1.0
_AFTER_FAILURE_SECONDS = 0.7  # the other ranks' own errors reach their logs meanwhile
_STACK_SECONDS = 1.5
_START_SECONDS = 300.0


class _Rank:
    """What the agent knows of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid: int | None = None
        self.keeper_pid: int | None = None
        self.code: int | None = None


class NodeAgent:
    """The state of one host's part in a run."""

    def __init__(self, spec: LaunchSpec, node_rank: int, lifeline: bool, plain: bool = False) -> None:
        self.spec, self.node_rank, self.lifeline = spec, node_rank, lifeline
        self.plain = PlainOutput() if plain else None
        self.host = spec.hosts[node_rank]
        first = spec.first_rank(node_rank)
        self.ranks = {rank: _Rank(rank) for rank in range(first, first + len(self.host.slots))}
        self.log_dir = Path(spec.run_directory) / "ranks" / self.host.name
        self.held = contextlib.ExitStack()  # locks, where no head process has them
        self.selector = selectors.DefaultSelector()
        self.launcher: subprocess.Popen[bytes] | None = None
        self.kill_at: float | None = None
        self.answer_by: float | None = None  # when ranks must have answered a signal
        self.patience = 0.0  # seconds they had for it
        self.stop_requested: int | None = None
        self.stacks_requested = self.stopping = self.showing_stacks = False
        self.code = 0

    # -- talking

    def tell(self, event: Event) -> None:
        """Send an event to the head process; when nobody reads any more, the run is over."""
        try:
            if self.plain is not None:
                self.plain.take(event)
                return
            sys.stdout.write(encode_event({**event, "node": self.node_rank}) + "\n")
            sys.stdout.flush()
        except (BrokenPipeError, OSError):
            self.end_now()

    def say(self, text: str) -> None:
        """Send a line for people."""
        for piece in text_events({"kind": "line", "rank": -1, "stream": "err"}, text):
            self.tell(piece)

    # -- starting

    def launcher_command(self, socket_path: Path) -> list[str]:
        """The command that starts this host's ranks, each under its keeper."""
        first = str(self.spec.first_rank(self.node_rank))
        return [
            *deepspeed_launch(self.spec, self.node_rank),
            "--module",
            "neox.launch.rank",
            str(socket_path),
            first,
            str(self.log_dir),
            self.spec.stdin or "",
            self.spec.script,
            *self.spec.arguments,
        ]

    def environment(self, directory: Path) -> dict[str, str]:
        """What ranks find in their environment on this host."""
        secrets = take_secrets(self.spec.run_id, self.node_rank)
        base = child_environment({**os.environ, **self.spec.environment, **secrets})
        own = [self.spec.code_root, *filter(None, [self.spec.environment.get("PYTHONPATH")])]
        base["PYTHONPATH"] = os.pathsep.join(own)
        base["PYTHONUNBUFFERED"] = "1"
        base["NEOX_RUN_DIRECTORY"] = self.spec.run_directory
        base[PROGRESS_VARIABLE] = str(directory / "progress")
        if count_accelerators() == 0:
            base[CPU_RANKS_VARIABLE] = "1"
        base.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // len(self.ranks))))
        return base

    def run(self) -> int:
        """Start the ranks, stay until the last has ended, return the first failure's exit status."""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_stacks)
        if self.plain is not None and self.node_rank == 0:
            hold(self.spec.reserved, Path(self.spec.script).name, self.held)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        directory = create_agent_directory(self.spec.run_id, self.node_rank)
        self.directory = directory
        self.progress = RankActivity(directory / "progress", self.log_dir)
        try:
            with socket.socket(socket.AF_UNIX) as listener, open(self.log_dir / "launcher.log", "ab") as log:
                listener.bind(str(directory / "socket"))
                listener.listen(len(self.ranks) + 8)
                self.selector.register(listener, selectors.EVENT_READ, ("listener", None))
                if self.lifeline:
                    ports = ssh_ports(os.environ)
                    follow_head(sys.stdin.fileno(), self.end_now, lambda: ports is not None and unanswered(ports))
                for lock in break_stale_locks():
                    self.say(f"{self.host.name}: removed {lock}, left by a build whose process is gone")
                self.launcher = subprocess.Popen(
                    self.launcher_command(directory / "socket"),
                    env=self.environment(directory),
                    cwd=self.spec.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=parent_death_hook(),
                )
                self.tell({"kind": "node", "host": self.host.name, "pid": os.getpid()})
                return self._watch()
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    # -- watching

    def _watch(self) -> int:
        beat = time.monotonic()
        launcher_gone: float | None = None
        while any(rank.code is None for rank in self.ranks.values()):
            for key, _ in self.selector.select(_POLL_SECONDS):
                self._handle(key)
            now = time.monotonic()
            if now - beat >= _HEARTBEAT_SECONDS:
                beat = now
                self.tell({"kind": "alive"})
            if self.stacks_requested:
                self._show_stacks()
            if self.stop_requested is not None and not self.stopping:
                self._stop_gently(self.stop_requested, now)
            self.progress.look()
            if self.answer_by is not None and now >= self.answer_by:
                self._end_silent_ranks()
            if self.kill_at is not None and now >= self.kill_at:
                self._kill_ranks()
            if self.launcher is not None and self.launcher.poll() is not None:
                launcher_gone = launcher_gone or now
                if now - launcher_gone > 1.0:
                    self._launcher_failed()
            self._check_progress()
        self._end_launcher()
        self._wait_for_keepers()
        self.tell({"kind": "done", "code": self.code})
        return self.code

    def _handle(self, key: selectors.SelectorKey) -> None:
        what, _ = key.data
        if what == "listener":
            connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
            self.selector.register(connection, selectors.EVENT_READ, ("keeper", _Keeper(connection)))
        else:
            self._hear(key)

    def _hear(self, key: selectors.SelectorKey) -> None:
        keeper: _Keeper = key.data[1]
        try:
            data = keeper.connection.recv(65536)
        except OSError:
            data = b""
        for line in keeper.buffer.feed(data):
            event = decode_event(line)
            if event is not None:
                self._take(keeper, event)
        if not data:
            self.selector.unregister(keeper.connection)
            keeper.connection.close()
            if keeper.rank is not None and self.ranks[keeper.rank].code is None:
                self._keeper_died(self.ranks[keeper.rank])

    def _take(self, keeper: _Keeper, event: Event) -> None:
        rank = self.ranks[event["rank"]]
        if event["kind"] == "start":
            keeper.rank, rank.pid, rank.keeper_pid = event["rank"], event["pid"], event["keeper"]
            self.progress.started = time.time()
            if self.stopping:  # the signal came before this rank did
                signal_group(event["pid"], signal.SIGKILL)
        shown_twice = self.showing_stacks and event["kind"] == "line"  # rank 0's
        no_error = self.plain is not None and event["kind"] == "exit" and self._was_asked_to(event["code"])
        if not (shown_twice or no_error):
            self.tell(event)
        if event["kind"] == "exit":
            self._ended(rank, event["code"])

    def _ended(self, rank: _Rank, code: int) -> None:
        rank.code = code
        if code != 0:
            self.code = self.code or exit_status(code)
            if not self._was_asked_to(code):  # waiting for this rank, the others will not get to saving
                self._kill_in(_AFTER_FAILURE_SECONDS)

    def _was_asked_to(self, code: int) -> bool:
        """Whether a rank ended by the signal that it was sent."""
        number = self.stop_requested
        return self.stopping and number is not None and code in (-number, 128 + number)

    def _kill_in(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self.kill_at = at if self.kill_at is None else min(self.kill_at, at)

    def _keeper_died(self, rank: _Rank) -> None:
        if rank.pid is not None:
            signal_group(rank.pid, signal.SIGKILL)
        if self.kill_at is None:
            self.say(f"the process that kept rank {rank.rank} was killed")
        self.tell({"kind": "exit", "rank": rank.rank, "code": -signal.SIGKILL})
        self._ended(rank, -signal.SIGKILL)

    def _launcher_failed(self) -> None:
        """DeepSpeed's launcher ended before its ranks told of their end."""
        missing = [rank for rank in self.ranks.values() if rank.code is None]
        if self.kill_at is None:
            assert self.launcher is not None
            self.code = exit_status(self.launcher.returncode) or 1
            tail = (self.log_dir / "launcher.log").read_text(errors="replace").splitlines()[-20:]
            self.say(f"DeepSpeed's launcher on {self.host.name} ended with status {self.code}; its last lines:")
            for line in tail:
                self.say("  " + line)
        for rank in missing:
            if rank.pid is not None:
                signal_group(rank.pid, signal.SIGKILL)
            rank.code = -signal.SIGKILL
        self.tell({"kind": "launcher", "code": self.code})

    # -- ending

    def _on_stop(self, number: int, _frame: Any) -> None:
        # Ranks know how to save at SIGTERM; a terminal that was closed asks for the same.
        self.stop_requested = signal.SIGTERM if number == signal.SIGHUP else number

    def _on_stacks(self, *_: Any) -> None:
        self.stacks_requested = True

    def _stop_gently(self, signum: int, now: float) -> None:
        self.stopping = True
        self._kill_in(self.spec.stop_timeout)
        self.patience = self.progress.patience()
        self.answer_by = now + self.patience
        for rank in self.ranks.values():
            if rank.pid is not None and rank.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signum)
        if all(rank.pid is None for rank in self.ranks.values()):
            self.code = 128 + signum
            self._end_launcher()

    def _end_silent_ranks(self) -> None:
        """Kill the ranks that ignore the signal or are stuck where they cannot hear it; the others follow."""
        self.answer_by = None
        for rank in self.ranks.values():
            if rank.pid is not None and rank.code is None and not self.progress.answered(rank.rank):
                where = f"rank {rank.rank} on {self.host.name}"
                self.say(f"{where} did not answer the signal within {self.patience:.0f} s: killed")
                signal_group(rank.pid, signal.SIGKILL)

    def _kill_ranks(self) -> None:
        for rank in self.ranks.values():
            if rank.pid is not None and rank.code is None:
                signal_group(rank.pid, signal.SIGKILL)
        if any(rank.pid is None for rank in self.ranks.values()):  # not started yet
            self._end_launcher()

    def _end_launcher(self) -> None:
        """The ranks have ended, or must never start: nothing is left for the launcher to do."""
        if self.launcher is not None:
            with contextlib.suppress(ProcessLookupError):
                self.launcher.kill()
            self.launcher.wait()

    def _wait_for_keepers(self) -> None:
        """They end with the launcher, and ranks with them; when this agent is done, all are gone."""
        deadline = time.monotonic() + 2.0
        pids = [pid for rank in self.ranks.values() for pid in (rank.keeper_pid, rank.pid) if pid is not None]
        while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.01)

    def end_now(self) -> None:
        """Nobody listens any more: kill everything and go."""
        for rank in self.ranks.values():
            if rank.pid is not None and rank.code is None:
                signal_group(rank.pid, signal.SIGKILL)
        self._end_launcher()
        self._wait_for_keepers()
        shutil.rmtree(self.directory, ignore_errors=True)
        os._exit(1)

    # -- hanging

    def _check_progress(self) -> None:
        timeout = self.spec.hang_timeout
        if timeout is None or self.kill_at is not None:
            return
        silent = time.time() - self.progress.last()
        if any(rank.pid is None for rank in self.ranks.values()):  # DeepSpeed's launcher is still importing
            timeout = max(timeout, _START_SECONDS)
        if silent < timeout:
            return
        self.code = EXIT_HANG
        self.tell({"kind": "hang", "seconds": silent})
        self._show_stacks()
        self.stacks_requested = False  # the head process asks every host, this one too
        self.kill_at = time.monotonic()

    def _show_stacks(self) -> None:
        """Ask every rank for its Python stacks and show what they wrote."""
        self.stacks_requested = False
        sizes: dict[int, int] = {}
        for rank in self.ranks.values():
            if rank.pid is not None and rank.code is None:
                with contextlib.suppress(OSError):
                    sizes[rank.rank] = self._log(rank).stat().st_size
                    os.kill(rank.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_SECONDS
        self.showing_stacks = True
        while time.monotonic() < deadline:  # keepers must be heard meanwhile, or their pipes could fill
            for key, _ in self.selector.select(_POLL_SECONDS):
                self._handle(key)
        self.showing_stacks = False
        for rank in self.ranks.values():
            self.say(f"--- stacks of rank {rank.rank} on {self.host.name} ---")
            running = rank.pid if rank.code is None else None
            for line in answer(running, self._log(rank), sizes.get(rank.rank, 0)):
                self.say(line)
        self.tell({"kind": "stacks"})

    def _log(self, rank: _Rank) -> Path:
        return self.log_dir / f"rank_{rank.rank:04d}.log"


class _Keeper:
    """A connection from one rank's keeper."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.buffer = LineBuffer()
        self.rank: int | None = None


def main() -> int:
    """Run the agent of one host."""
    parser = argparse.ArgumentParser(prog="python -m neox.launch.node", description="Start and watch one host's ranks.")
    parser.add_argument("spec", help="the run, as base64")
    parser.add_argument("--node_rank", required=True, help="number of this host, from 0; `auto` asks slurm or mpirun")
    parser.add_argument("--lifeline", action="store_true", help="end when standard input ends")
    parser.add_argument("--plain", action="store_true", help="write for people: no head process is listening")
    arguments = parser.parse_args()
    spec, node_rank = LaunchSpec.decode(arguments.spec), _node_rank(arguments.node_rank)
    try:
        return NodeAgent(spec, node_rank, arguments.lifeline, arguments.plain).run()
    except OSError as error:  # the directories of the run, as a rule
        raise LaunchError(f"ranks cannot be started on {spec.hosts[node_rank].name}: {error}") from None


def _node_rank(text: str) -> int:
    """Read a host's number, or find it where srun and mpirun put it (one agent per host)."""
    if text != "auto":
        return int(text)
    for name in ("SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    raise LaunchError("neither SLURM_NODEID nor OMPI_COMM_WORLD_RANK is set: was this started by srun or mpirun?")


if __name__ == "__main__":
    run_script(main)
