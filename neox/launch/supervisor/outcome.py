"""Outcome of a run in which ranks have failed: the failure that came first, and its consequences on other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from neox.launch.agent.agent_files import FailureReport
from neox.launch.events import Event
from neox.launch.failures import (
    begins_failure,
    cpp_message,
    failure_cause,
    is_error_message,
    is_secondary,
    without_rank_mark,
)
from neox.launch.spec import LaunchSpec
from neox.run_events import NOT_STARTED

_MAX_MESSAGE = 160  # characters
_MAX_SHOWN = 8  # ranks with a line of their own


class EndKind(Enum):
    """How a started run has ended."""

    FINISHED = "finished"
    ASKED = "asked to end"  # by a signal to the launcher
    RANK = "rank failed"
    HANG = "hang"
    HOST = "host lost"
    PREEMPTED = "preempted"  # a host was about to be preempted, and the run was asked to end
    NO_AGENT = "no agent started"
    SILENT = "no report"  # agents ended without a report about their ranks
    NOT_STARTED = NOT_STARTED  # a host that nothing can replace did not answer


@dataclass(frozen=True)
class RunEnd:
    """End of a run, or of one of its starts.

    Attributes:
        kind: Kind of the end.
        status: Exit status.
        cause: Description of what happened.
        rank: The rank that failed first; None if unknown.
        hosts: Names of the hosts on which the failure happened, if known.
        step: Number of completed steps; None if unknown.
        report: Failure report of a rank; None if there is none.
        asked: Whether a signal to the launcher had asked the run to end. It may have failed before or after it.
        preempted: Names of the hosts that are about to be preempted.
    """

    kind: EndKind
    status: int
    cause: str = ""
    rank: int | None = None
    hosts: tuple[str, ...] = ()
    step: int | None = None
    report: FailureReport | None = None
    asked: bool = False
    preempted: tuple[str, ...] = ()

    @property
    def reported_cause(self) -> str | None:
        """The cause reported by a rank, a value in `Cause`; None without a report."""
        if self.report is None:
            return None
        return self.report.cause

    @property
    def damaged_checkpoint(self) -> str | None:
        """Path of the checkpoint that a rank reported as damaged; None without such a report."""
        if self.report is None:
            return None
        return self.report.checkpoint


@dataclass
class Failure:
    """Failure of one rank.

    Attributes:
        rank: Global rank.
        code: `returncode` of its process.
        out_of_memory: Whether it lacked memory.
        killed: Whether its agent killed it: another rank had failed, or it did not answer a signal.
        text: Last lines of its stderr, each with a line end.
        step: Number of completed steps; None if unknown.
        report: Failure report of the rank; None if there is none.
    """

    rank: int
    code: int
    out_of_memory: bool = False
    killed: bool = False
    text: str = ""
    step: int | None = None
    report: FailureReport | None = None

    @staticmethod
    def of_event(event: Event, text: str) -> Failure:
        """Return the failure that an `exit` event reports.

        Args:
            event: The event.
            text: Last lines of the rank's stderr, each with a line end.
        """
        report = event.get("report")
        if report is not None:
            report = FailureReport.from_json(report)
        return Failure(
            event["rank"],
            event["code"],
            event["out_of_memory"],
            event["killed"],
            text,
            event.get("step"),
            report,
        )

    @property
    def lines(self) -> list[str]:
        """Last lines of its stderr, without line ends."""
        return self.text.split("\n")[:-1]

    @property
    def message(self) -> str:
        """First line of an error message or a C++ exception; otherwise the last line, which names the exception."""
        cpp = cpp_message(self.lines)
        if cpp is not None:
            return cpp.strip()
        lines = [without_rank_mark(line).strip() for line in self.lines]
        lines = [line for line in lines if line]
        if not lines:
            return ""
        if is_error_message(lines[0]):
            return lines[0].removesuffix(":")
        return lines[-1]

    def has_own_message(self) -> bool:
        """Return whether the rank has written a traceback or an error, and not only log lines."""
        return bool(self.text) and begins_failure(self.lines[0])

    def is_consequence(self) -> bool:
        """Return whether it looks like the consequence of another rank's end."""
        return self.killed or is_secondary(self.lines)


def find_cause(failures: Iterable[Failure]) -> Failure | None:
    """Return the first failure that does not look like the consequence of another one; None if all do."""
    for failure in failures:
        if not failure.is_consequence():
            return failure
    return None


def end_by_failure(spec: LaunchSpec, status: int, cause: Failure, failures: Sequence[Failure]) -> RunEnd:
    """Return the end of a run in which ranks have failed.

    Args:
        spec: The run.
        status: Exit status of the run.
        cause: Failure that came first.
        failures: All failures, `cause` among them.
    """
    report = cause.report
    for failure in failures:
        if report is None:  # another rank may have reported the cause, such as a full disk
            report = failure.report
    ranks: tuple[int, ...] = (cause.rank,)
    if report is not None and report.ranks:
        ranks = report.ranks
    hosts = tuple(dict.fromkeys(spec.host_of(rank).name for rank in ranks))
    steps = [failure.step for failure in failures if failure.step is not None]
    step = max(steps, default=None)
    if report is not None and report.step is not None:
        step = report.step
    how = failure_cause(cause.code, cause.out_of_memory, None)
    description = f"rank {cause.rank} on {spec.host_of(cause.rank).name} ended with {how}"
    if cause.has_own_message():
        description += f": {shortened(cause.message)}"
    return RunEnd(EndKind.RANK, status, description, ranks[0], hosts, step, report)


def explain(spec: LaunchSpec, cause: Failure, failures: Sequence[Failure]) -> list[str]:
    """Return lines that explain a failed run: the consequences first, the last lines of the cause last.

    Args:
        spec: The run.
        cause: Failure that came first.
        failures: All failures, `cause` among them.
    """
    lines = []
    others = [failure for failure in failures if failure.rank != cause.rank]
    if others:
        lines.append(f"rank {cause.rank} failed first; consequences on other ranks:")
        for line in _consequences(spec, cause, others):
            lines.append(f"  {line}")
    host = spec.host_of(cause.rank).name
    how = failure_cause(cause.code, cause.out_of_memory, spec.rank_bytes)
    log = spec.log_path(cause.rank)
    if cause.text:
        lines.append(f"error: rank {cause.rank} on {host} ended with {how}; its last lines (log: {log}):")
        lines += cause.lines
    else:
        lines.append(f"error: rank {cause.rank} on {host} ended with {how}, without any output on stderr (log: {log})")
    return lines


def _consequences(spec: LaunchSpec, cause: Failure, others: Sequence[Failure]) -> list[str]:
    """Return one line for each rank with its own message, and one line for each group of other ranks."""
    ended = []
    same = []
    lines = []
    for failure in sorted(others, key=lambda other: other.rank):
        if failure.message and failure.message == cause.message:
            same.append(failure.rank)
        elif failure.killed and not failure.has_own_message():
            ended.append(failure.rank)
        else:
            message = failure_cause(failure.code, failure.out_of_memory, None)
            if failure.has_own_message() or is_secondary(failure.lines):
                message = shortened(failure.message)
            lines.append(f"rank {failure.rank}: {message} (log: {spec.log_path(failure.rank)})")
    if len(lines) > _MAX_SHOWN:
        hidden = len(lines) - _MAX_SHOWN
        lines[_MAX_SHOWN:] = [f"and {hidden} more ranks (logs below {spec.run_directory})"]
    if same:
        lines.append(f"{rank_list(same)}: the same error")
    if ended:
        lines.append(f"{rank_list(ended)}: ended with it")
    return lines


def shortened(message: str) -> str:
    """Return a message, cut if it is long."""
    if len(message) <= _MAX_MESSAGE:
        return message
    return message[:_MAX_MESSAGE] + "..."


def rank_list(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text, with ranges, such as `ranks 0, 2-7`."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1] = [ranges[-1][0], rank]
        else:
            ranges.append([rank])
    texts = ["-".join(map(str, bounds)) for bounds in ranges]
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(texts)}"
