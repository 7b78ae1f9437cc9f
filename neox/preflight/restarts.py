"""Restarts of a failed training by `deepy.py`: what is recorded, which hosts are judged, what the next start changes.

Who notices a failure, and who decides what, is in the picture of `neox.launch`. The loop is `StartRun.start`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from neox.checkpoint_files.finding import checkpoint_directories, step_of
from neox.config import NeoXConfig
from neox.decisions.checkpoint import choose_checkpoint
from neox.errors import NeoXError
from neox.launch.agent.agent_files import Cause
from neox.launch.spec import LaunchSpec
from neox.launch.status.event_log import record_event
from neox.launch.supervisor.outcome import EndKind, RunEnd
from neox.plan.run_start import FIRST_LOAD_KEYS, ChosenStart, requested_start
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
        start_left_to_ranks: Whether rank 0 decides about the checkpoint, because it has twice seen another one.
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
        self.start_left_to_ranks = False
        self._was_stale = False
        self._has_trained = False  # whether a start has taken a step, after it has moved superseded checkpoints away
        self._damaged: dict[Path, int | None] = {}

    @property
    def advice(self) -> str:
        """Hint about `max_restarts` for a failed training without it; empty otherwise."""
        if self._trains and self._policy.allowed == 0:
            return _ADVICE
        return ""

    def record_start(
        self,
        spec: LaunchSpec,
        directory: Path,
        left_out: Mapping[str, str],
        samples: int,
        start: ChosenStart | None = None,
    ) -> None:
        """Record that the ranks are about to be started.

        Args:
            spec: The start.
            directory: The run directory.
            left_out: Names of the hosts that do not take part, with the reason and the consequence.
            samples: Number of samples of a step on all ranks.
            start: How the run starts.
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
            step=start.step if start is not None and start.continues else None,
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
        self._judge_start(end)
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
        if (self._policy.allowed or decision.restart) and decision.reason:
            action = "no restart"
            if decision.restart:
                action = f"{decision.text} from {self._origin_of_next()}"
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
        asked = requested_start(self._config)
        if self._has_saved():
            dropped.append("overwrite")  # it would move away the checkpoints of this run
            if asked.own_directory or asked.iteration_of_save:
                dropped += FIRST_LOAD_KEYS
        elif self._has_trained and self._config.checkpoint.checkpoint_mirror is None:
            # The run may have saved to disks of the hosts, and what these keys move away has been moved.
            dropped.append("overwrite")
            if asked.iteration_of_save:
                dropped.append("iteration")
        return self._config.updated({}, without=dropped)

    def _origin_of_next(self) -> str:
        """Return in words where the next start begins, as far as the launcher sees it."""
        decided = choose_checkpoint(self.next_config(), self.damaged)
        if decided.start.continues:
            return f"the checkpoint of step {decided.start.step}"
        if decided.none_complete:
            return "no checkpoint, because none is complete"
        if self.start_left_to_ranks:
            return "the checkpoint that rank 0 finds"
        return "the beginning, because there is no checkpoint"

    @property
    def damaged(self) -> tuple[Path, ...]:
        """Checkpoints that starts have found damaged, and that have not been replaced since."""
        return tuple(path for path, inode in self._damaged.items() if _inode(path) == inode)

    def _judge_start(self, end: RunEnd) -> None:
        """Take into account that the ranks could not start as it was decided."""
        is_stale = end.reported_cause == Cause.STALE_START
        if end.step is not None and not is_stale and end.kind is not EndKind.NOT_STARTED:
            self._has_trained = True
            self._damaged.clear()  # they have been moved away, and the run may have saved their steps anew
        if is_stale and end.damaged_checkpoint is not None:
            damaged = Path(end.damaged_checkpoint)
            self._damaged[damaged] = _inode(damaged)
            is_stale = False
        self.start_left_to_ranks |= is_stale and self._was_stale
        self._was_stale = is_stale

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
            inode = _inode(path)
            if inode is not None:
                found.add((step_of(path) or 0, inode))
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


def _inode(path: Path) -> int | None:
    """Return what distinguishes a directory from another one of its name; None if it is gone."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
