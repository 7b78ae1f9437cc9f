"""Restarts of a failed training by `deepy.py`: decision, event log, and changes for the next start."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from neox.config import NeoXConfig
from neox.errors import NeoXError
from neox.launch.agent.agent_files import Cause
from neox.launch.spec import LaunchSpec
from neox.launch.status.event_log import record_event
from neox.launch.supervisor.outcome import EndKind, RunEnd
from neox.launch.supervisor.restart_policy import RestartPolicy
from neox.plan.run_identity import FIRST_LOAD_KEYS, find_run, resumes_own_directory, step_directories
from neox.run_events import LEFT_OUT

_ADVICE = (
    "a failed training can be restarted automatically from its newest checkpoint: set `max_restarts: N` and `save`, or "
    "add --max-restarts N"
)

_SIGNAL_STATUS_BASE = 128  # an exit status above it stands for a signal
_FAILURES_OF_SUSPECT = 3  # consecutive failures that make a host suspect


class Restarts:
    """Restarts of one run.

    Args:
        config: The configuration of the first start.
        script: Script of the ranks. Only trainings are restarted.

    Attributes:
        unfit: Names of the hosts that must no longer take part, with the reasons.
        can_move: Whether other hosts may be used at the next start.
        suspects: Names of the hosts that should not take part if others can, with the reasons.
        lost: Hosts that were lost at the end of the last start.
        awaited: Hosts that were lost then, or that tries to start have lacked since. They may be coming back.
        doubts_links: Whether a link between hosts may be at fault, so that they are measured before the next start.
    """

    def __init__(self, config: NeoXConfig, script: Path) -> None:
        self._config = config
        self._trains = script.stem == "train"
        allowed = 0
        if self._trains:
            allowed = config.healing.max_restarts
        self._policy = RestartPolicy(allowed)
        self._earlier = self._checkpoints()
        self._ranks: int | None = None  # of the last start
        self._samples = 0  # of a step of the last start
        self._failures_in_a_row: list[str] = []  # one entry per consecutive failure on the same host
        self._preempted: tuple[str, ...] = ()  # hosts that are left out of the next start only
        self.can_move = False
        self.lost: frozenset[str] = frozenset()
        self.awaited: frozenset[str] = frozenset()
        self.doubts_links = True
        self.unfit: dict[str, str] = {}
        self.suspects: dict[str, str] = {}

    @property
    def advice(self) -> str:
        """Hint about `max_restarts` for a failed training without it; empty otherwise."""
        if self._trains and self._policy.allowed == 0:
            return _ADVICE
        return ""

    def starting(self, spec: LaunchSpec, directory: Path, left_out: Mapping[str, str], samples: int) -> None:
        """Record a start.

        Args:
            spec: The start.
            directory: The run directory.
            left_out: Names of the hosts that do not take part, with the reason and the consequence.
            samples: Number of samples of a step on all ranks.
        """
        self._policy.started()
        if not self._trains:
            return
        for host, reason in left_out.items():
            record_event(directory, LEFT_OUT, host=host, reason=reason)
            _print(f"{host} is left out: {reason}")
        if self._ranks not in (None, spec.world_size):
            change = f"{spec.world_size} ranks instead of {self._ranks}, with {self._describe_batch(samples)}"
            record_event(directory, "ranks changed", ranks=spec.world_size, before=self._ranks, reason=change)
            _print(change)
        self._ranks = spec.world_size
        self._samples = samples
        record_event(
            directory,
            "start",
            restart=self._policy.restarts,
            hosts=spec.host_names,
            ranks=spec.world_size,
            step=self._saved_step(),
        )

    def _describe_batch(self, samples: int) -> str:
        """Return how the batch of a start compares with that of the last one; a changed hostfile may change it."""
        if samples == self._samples:
            return "the same batch"
        return f"a batch of {samples} samples instead of {self._samples}"

    def follow(self, end: RunEnd, directory: Path) -> bool:
        """Record the end of a start, decide about a restart, and wait for its pause.

        Args:
            end: How the start has ended.
            directory: The run directory.

        Returns:
            Whether to restart the run.
        """
        if not self._trains:
            return False
        decision = self._policy.decide(end, can_move=self.can_move)
        self._judge_hosts(end)
        record_event(
            directory,
            "end",
            kind=end.kind.value,
            status=end.status,
            host=", ".join(end.hosts) or None,
            rank=end.rank,
            cause=end.cause or None,
            reported=end.reported_cause,
            step=end.step,
            decision=decision.text,
            reason=decision.reason or None,
        )
        if self._policy.allowed and decision.reason:
            action = "no restart"
            if decision.restart:
                action = f"{decision.text} from {self._describe_start()}"
            _print(f"{action}: {decision.reason}")
        if decision.pause:
            time.sleep(decision.pause)
        return decision.restart

    def _judge_hosts(self, end: RunEnd) -> None:
        """Update the hosts that should not take part in the next start."""
        if end.kind is EndKind.NOT_STARTED:
            self.awaited |= frozenset(end.hosts)
            return
        self.lost = frozenset()
        if end.kind is EndKind.HOST:
            self.lost = frozenset(end.hosts)
        self.awaited = self.lost
        was_killed = end.kind is EndKind.RANK and end.status > _SIGNAL_STATUS_BASE
        self.doubts_links = not self.lost and not was_killed and end.kind is not EndKind.PREEMPTED
        for host in self._preempted:  # if one still is, the check before the start finds its notice
            self.unfit.pop(host, None)
        self._preempted = end.preempted
        self.unfit |= dict.fromkeys(end.preempted, "it is about to be preempted")
        report = end.report
        if report is not None and report.cause == Cause.REPLICAS and report.ranks:
            for host in end.hosts:
                self.unfit[host] = f"its weights differed from those of the other data ranks at step {end.step}"
        if len(end.hosts) != 1:
            self._failures_in_a_row = []
            return
        host = end.hosts[0]
        if host not in self._failures_in_a_row:
            self._failures_in_a_row = []
        self._failures_in_a_row.append(host)
        if len(self._failures_in_a_row) == _FAILURES_OF_SUSPECT:
            self.suspects[host] = f"the last {_FAILURES_OF_SUSPECT} failures happened on it"

    def next_config(self) -> NeoXConfig:
        """Return the configuration of the next start, which resumes from the newest checkpoint of this run."""
        dropped: list[str] = []
        if self._has_saved():
            dropped.append("overwrite")  # it would move away the checkpoints of this run
            if resumes_own_directory(self._config):
                dropped += FIRST_LOAD_KEYS
        return self._config.updated({}, without=dropped)

    def _has_saved(self) -> bool:
        """Return whether the run has saved a checkpoint since its first start."""
        return not self._checkpoints() <= self._earlier

    @contextmanager
    def recording_refusals(self, directory: Path) -> Iterator[None]:
        """Record an error of the block, which ends a run that has been started, in the event log."""
        try:
            yield
        except NeoXError as error:
            if self._ranks is None:  # no start has been recorded
                raise
            record_event(directory, "end", cause=str(error), decision="stop", reason="the start was rejected")
            raise

    def _saved_step(self) -> int | None:
        """Return the iteration of the checkpoint that a start resumes from; None if it starts from the beginning."""
        keys = self._config.checkpoint
        loaded = None
        if keys.load is not None and not keys.finetune:
            loaded = find_run(Path(keys.load))
        own = None
        if keys.save is not None and (self._has_saved() or not keys.overwrite):
            own = find_run(Path(keys.save))
        if own is not None and (self._has_saved() or not resumes_own_directory(self._config)):
            return own.iteration
        if loaded is None:
            return None
        return keys.iteration or loaded.iteration

    def _describe_start(self) -> str:
        step = self._saved_step()
        if step is None:
            return "the beginning, because there is no checkpoint"
        return f"the checkpoint of step {step}"

    def _checkpoints(self) -> set[tuple[int, int]]:
        """Return step and inode of each checkpoint in `save`.

        The file `latest` names a new checkpoint too late: a rank may die between the two.
        """
        save = self._config.checkpoint.save
        if save is None:
            return set()
        found = set()
        for step, path in step_directories(Path(save)).items():
            with suppress(OSError):
                found.add((step, path.stat().st_ino))
        return found


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
