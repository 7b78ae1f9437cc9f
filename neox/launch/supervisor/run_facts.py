"""What the launcher knows about a start of a run, and what it concludes when the start has ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from neox.files import write_text
from neox.launch.failures import EXIT_HANG
from neox.launch.processes import exit_status
from neox.launch.spec import LaunchSpec
from neox.launch.supervisor.outcome import EndKind, Failure, RunEnd, end_by_failure, explain, find_cause


@dataclass
class RunFacts:
    """What the launcher knows about a start. Hosts have their numbers in the specification.

    Attributes:
        spec: The start.
        heard_at: When an agent was last heard, a time of the monotonic clock.
        hosts_done: Exit status of each agent that has reported the end of all its ranks.
        hosts_lost: What happened to the connection to each host that was lost.
        failures: Failures of ranks, in the order of their reports.
        step: Number of completed steps, as far as agents have reported it.
        hung: Whether an agent has reported that its ranks make no progress.
        stopped_rank: Rank of a run that hung which is stopped by a signal; None if none is known.
        stacks: Stacks of the ranks of a run that hung.
        stop_signal: Signal that the ranks are asked to save and end with; None if they are not asked.
        asked_by_signal: Whether a signal to the launcher asked for it, and not only a preemption notice.
        preempted: Names of the hosts that are about to be preempted, with the notices.
    """

    spec: LaunchSpec
    heard_at: dict[int, float] = field(default_factory=dict)
    hosts_done: dict[int, int] = field(default_factory=dict)
    hosts_lost: dict[int, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    step: int | None = None
    hung: bool = False
    stopped_rank: int | None = None
    stacks: list[str] = field(default_factory=list)
    stop_signal: int | None = None
    asked_by_signal: bool = False
    preempted: dict[str, str] = field(default_factory=dict)

    @property
    def running_hosts(self) -> list[str]:
        """Names of the hosts whose ranks are still running, as far as is known."""
        gone = {*self.hosts_done, *self.hosts_lost}
        return [host.name for node, host in enumerate(self.spec.hosts) if node not in gone]

    def is_by_stop_signal(self, failure: Failure) -> bool:
        """Return whether a rank ended by the stop signal, or with the exit status that stands for it."""
        return self.stop_signal is not None and failure.code in (-self.stop_signal, 128 + self.stop_signal)


def conclude(facts: RunFacts, connection_statuses: Sequence[int]) -> tuple[RunEnd, list[str]]:
    """Return how a start has ended, and lines that explain a failure, with the first failure's traceback last.

    Args:
        facts: What is known about the start.
        connection_statuses: Exit statuses of the processes that led to the agents.
    """
    end, explanation = _end_and_explanation(facts, connection_statuses)
    step = facts.step if end.step is None else end.step
    return replace(end, step=step, asked=facts.asked_by_signal, preempted=tuple(facts.preempted)), explanation


def _end_and_explanation(facts: RunFacts, connection_statuses: Sequence[int]) -> tuple[RunEnd, list[str]]:
    spec = facts.spec
    if facts.hung:
        cause = "no rank made progress"
        explanation = [f"ended: the run hung; {_write_stacks(facts)}"]
        rank = facts.stopped_rank
        if rank is None:
            return RunEnd(EndKind.HANG, EXIT_HANG, cause), explanation
        host = spec.host_of(rank).name
        return RunEnd(EndKind.HANG, EXIT_HANG, f"{cause}; rank {rank} on {host} is stopped", rank, (host,)), explanation

    first_failure = _first_failure(facts)
    if first_failure is not None:
        end = end_by_failure(spec, exit_status(first_failure.code), first_failure, facts.failures)
        return end, explain(spec, first_failure, facts.failures)

    all_done = len(facts.hosts_done) == len(spec.hosts)
    if facts.stop_signal is not None:
        status = 128 + facts.stop_signal
        if all_done and not facts.failures:
            status = max(facts.hosts_done.values())
        if facts.asked_by_signal:
            return RunEnd(EndKind.ASKED, status), []
        notices = "; ".join(facts.preempted.values())
        return RunEnd(EndKind.PREEMPTED, status, notices, hosts=tuple(facts.preempted)), []

    if all_done:
        return RunEnd(EndKind.FINISHED, max(facts.hosts_done.values())), []

    if facts.hosts_lost:
        lost = [f"lost {spec.hosts[node].name} ({how})" for node, how in facts.hosts_lost.items()]
        names = tuple(spec.hosts[node].name for node in facts.hosts_lost)
        explanation = [f"error: {text}; the run was ended on every host" for text in lost]
        return RunEnd(EndKind.HOST, 1, "; ".join(lost), hosts=names), explanation

    missing = [host.name for node, host in enumerate(spec.hosts) if node not in facts.hosts_done]
    names_of_missing = ", ".join(missing)
    explanation = [f"error: the run ended on {names_of_missing} without a report about its ranks"]
    status = max([1, *connection_statuses])
    if not facts.heard_at:
        return RunEnd(EndKind.NO_AGENT, status, f"no agent has started on {names_of_missing}"), explanation
    cause = f"{names_of_missing} ended without a report about its ranks"
    return RunEnd(EndKind.SILENT, status, cause, hosts=tuple(missing)), explanation


def _first_failure(facts: RunFacts) -> Failure | None:
    """Return the failure that came first; None if there is none, or if something else has caused all of them.

    That is the stop signal, or a lost host, whose end broke the connections of the other ranks.
    """
    failures = []
    for failure in facts.failures:
        # Ranks that do not end by the signal in time are killed.
        was_killed = facts.stop_signal is not None and failure.code == -signal.SIGKILL
        if not was_killed and not facts.is_by_stop_signal(failure):
            failures.append(failure)
    cause = find_cause(failures)
    nobody_was_asked = len(failures) == len(facts.failures)
    if cause is None and failures and nobody_was_asked and not facts.hosts_lost:
        return next((failure for failure in failures if not failure.killed), failures[0])
    return cause


def _write_stacks(facts: RunFacts) -> str:
    """Write every rank's stacks to one file of the run directory, and return where they are."""
    directory = Path(facts.spec.run_directory)
    logs = directory / "ranks"
    try:
        write_text(directory / "stacks.txt", facts.stacks)
    except OSError as error:
        return f"stacks.txt cannot be written ({error.strerror}); the logs in {logs} contain them"
    return f"every rank's stacks are in {directory / 'stacks.txt'}, and in its log below {logs}"
