"""Restarts of a failed training by `deepy.py`: what is recorded, which hosts are judged, what the next start changes.

Who notices a failure, and who decides what, is in the picture of `neox.launch`. The loop is `StartRun.start`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from neox.checkpoint_files.finding import checkpoint_directories, step_of
from neox.config import NeoXConfig
from neox.errors import NeoXError
from neox.launch.agent.agent_files import Cause
from neox.launch.spec import LaunchSpec
from neox.launch.status.event_log import record_event
from neox.launch.supervisor.outcome import EndKind, RunEnd
from neox.plan.run_identity import FIRST_LOAD_KEYS, find_run, resumes_own_directory
from neox.preflight.restart_policy import RestartDecision, RestartPolicy
from neox.run_events import LEFT_OUT

_ADVICE = (
    "a failed training can be restarted automatically from its newest checkpoint: set `max_restarts: N` and `save`, or "
    "add --max-restarts N"
)

_SIGNAL_STATUS_BASE = 128  # an exit status above it stands for a signal
_FAILURES_OF_SUSPECT = 3  # consecutive failures that make a host suspect


class Restarts:
    """Starts of one run, and their ends.

    Args:
        config: The configuration of the first start.
        script: Script of the ranks. Only trainings are restarted.

    Attributes:
        hosts: What the ends of starts say about hosts.
        can_move: Whether other hosts may be used at the next start.
    """

    def __init__(self, config: NeoXConfig, script: Path) -> None:
        self._config = config
        self._trains = script.stem == "train"
        self._policy = RestartPolicy(config.healing.max_restarts if self._trains else 0)
        self._checkpoints_before = self._checkpoints()
        self._last_ranks: int | None = None  # number of ranks of the last start; None before the first
        self._last_samples = 0  # of a step of the last start
        self.hosts = HostJudgement()
        self.can_move = False

    @property
    def advice(self) -> str:
        """Hint about `max_restarts` for a failed training without it; empty otherwise."""
        if self._trains and self._policy.allowed == 0:
            return _ADVICE
        return ""

    def record_start(self, spec: LaunchSpec, directory: Path, left_out: Mapping[str, str], samples: int) -> None:
        """Record that the ranks are about to be started.

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
        if self._last_ranks not in (None, spec.world_size):
            batch = "the same batch"
            if samples != self._last_samples:  # a changed hostfile may change it
                batch = f"a batch of {samples} samples instead of {self._last_samples}"
            change = f"{spec.world_size} ranks instead of {self._last_ranks}, with {batch}"
            record_event(directory, "ranks changed", ranks=spec.world_size, before=self._last_ranks, reason=change)
            _print(change)
        self._last_ranks = spec.world_size
        self._last_samples = samples
        record_event(
            directory,
            "start",
            restart=self._policy.restarts,
            hosts=spec.host_names,
            ranks=spec.world_size,
            step=self._step_to_resume(),
        )

    def decide(self, end: RunEnd, directory: Path) -> RestartDecision:
        """Decide about a restart, and record the end and the decision.

        Args:
            end: How the last start has ended.
            directory: The run directory.
        """
        if not self._trains:
            return RestartDecision(restart=False)
        decision = self._policy.decide(end, can_move=self.can_move)
        self.hosts.judge(end)
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
                step = self._step_to_resume()
                origin = "the beginning, because there is no checkpoint"
                if step is not None:
                    origin = f"the checkpoint of step {step}"
                action = f"{decision.text} from {origin}"
            _print(f"{action}: {decision.reason}")
        return decision

    @contextmanager
    def recording_refusals(self, directory: Path) -> Iterator[None]:
        """Record an error of the block, which ends a run that has been started, in the event log."""
        try:
            yield
        except NeoXError as error:
            if self._last_ranks is not None:
                record_event(directory, "end", cause=str(error), decision="stop", reason="the start was rejected")
            raise

    # -- the checkpoint that the next start resumes from

    def next_config(self) -> NeoXConfig:
        """Return the configuration of the next start, which resumes from the newest checkpoint of this run."""
        dropped: list[str] = []
        if self._has_saved():
            dropped.append("overwrite")  # it would move away the checkpoints of this run
            if resumes_own_directory(self._config):
                dropped += FIRST_LOAD_KEYS
        return self._config.updated({}, without=dropped)

    def _step_to_resume(self) -> int | None:
        """Return the iteration of the checkpoint that a start resumes from; None if it starts from the beginning."""
        keys = self._config.checkpoint
        if keys.save is not None and (self._has_saved() or not keys.overwrite):
            own = find_run(Path(keys.save))
            if own is not None and (self._has_saved() or not resumes_own_directory(self._config)):
                return own.iteration
        if keys.load is None or keys.finetune:
            return None
        loaded = find_run(Path(keys.load), keys.iteration)
        return None if loaded is None else loaded.iteration

    def _has_saved(self) -> bool:
        """Return whether the run has saved a checkpoint since its first start."""
        return not self._checkpoints() <= self._checkpoints_before

    def _checkpoints(self) -> set[tuple[int, int]]:
        """Return step and inode of each checkpoint in `save`.

        The file `latest` names a new checkpoint too late: a rank may die between the two.
        """
        save = self._config.checkpoint.save
        if save is None:
            return set()
        found = set()
        for path in checkpoint_directories(Path(save)):
            with suppress(OSError):
                found.add((step_of(path) or 0, path.stat().st_ino))
        return found


class HostJudgement:
    """What the ends of starts say about hosts, for the choice of hosts and the checks before the next start.

    Attributes:
        unfit: Names of the hosts that must no longer take part, with the reasons.
        suspects: Names of the hosts that should not take part if others can, with the reasons.
        lost: Hosts that were lost at the end of the last start.
        awaited: Hosts that were lost then, or that tries to start have lacked since. They may be coming back.
        doubts_links: Whether a link between hosts may be at fault, so that they are measured before the next start.
    """

    def __init__(self) -> None:
        self.unfit: dict[str, str] = {}
        self.suspects: dict[str, str] = {}
        self.lost: frozenset[str] = frozenset()
        self.awaited: frozenset[str] = frozenset()
        self.doubts_links = True
        self._preempted: tuple[str, ...] = ()  # they are unfit for the next start only
        self._failures_in_a_row: list[str] = []  # the same host, once for each consecutive failure on it

    def judge(self, end: RunEnd) -> None:
        """Take the end of a start, or of a try to start, into account."""
        if end.kind is EndKind.NOT_STARTED:
            self.awaited |= frozenset(end.hosts)
            return
        self.lost = frozenset(end.hosts) if end.kind is EndKind.HOST else frozenset()
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


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
