"""Failure reports to the launcher, which decides whether to restart the run."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from neox.errors import ConfigError, NoCheckpointError, NotFiniteError, ReplicaError, StaleStartError
from neox.launch import Cause, FailureReport, report_failure

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def reported_failures() -> Iterator[None]:
    """Report an exception of the block to the launcher, if its kind affects the decision about a restart."""
    try:
        yield
    except Exception as error:
        report = failure_report(error)
        if report is not None:
            report_failure(report)
        raise


def failure_report(error: BaseException) -> FailureReport | None:
    """Return the report of an exception for the launcher; None if it needs no special decision."""
    if isinstance(error, NotFiniteError):
        return FailureReport(Cause.NOT_FINITE, error.step)
    if isinstance(error, ReplicaError):
        return FailureReport(Cause.REPLICAS, error.step, error.ranks)
    if isinstance(error, StaleStartError):
        return FailureReport(Cause.STALE_START, checkpoint=error.damaged)
    if isinstance(error, NoCheckpointError):
        return FailureReport(Cause.NO_CHECKPOINT)
    if isinstance(error, ConfigError):
        return FailureReport(Cause.REFUSED)
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, OSError) and reason.errno in _FULL:
            return FailureReport(Cause.DISK_FULL)
        reason = reason.__cause__ or reason.__context__
    return None
