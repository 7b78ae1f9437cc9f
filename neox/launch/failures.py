"""Why a rank has failed, read from its exit status and its last lines."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

_START = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FATAL = ("Fatal Python error:", "terminate called", "Segmentation fault")
_SECONDARY = re.compile(
    r"Connection (reset|closed) by peer|Connection refused|Broken pipe|remote process exited|Socket Timeout"
    r"|NCCL (error|communicator was aborted)|Software caused connection abort|recvValue failed"
    r"|store is being destroyed",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(r"^MemoryError|can't allocate memory|std::bad_alloc|out of memory", re.IGNORECASE)
_MAX_LINES = 20
_REASON_LINES = 8  # at the end, where the message of an exception stands


def failure_text(lines: Sequence[str]) -> list[str]:
    """Return the last traceback among the lines, with the exceptions it is chained to; else the last lines."""
    starts = [number for number, line in enumerate(lines) if line.strip() == _START]
    fatal = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    if fatal and (not starts or fatal[-1] > starts[-1]):
        return list(lines[fatal[-1] :])
    if not starts:
        return list(lines[-_MAX_LINES:])
    first = starts.pop()
    while starts and _has_chain_mark(lines[starts[-1] : first]):
        first = starts.pop()
    return list(lines[first:])


def _has_chain_mark(lines: Sequence[str]) -> bool:
    """Return whether one of the lines says that the next traceback belongs to the one before."""
    return any(line.startswith(_CHAINED) for line in lines)


def lacks_memory(lines: Sequence[str]) -> bool:
    """Return whether the last lines of a rank say that memory could not be allocated, on a CPU or a GPU."""
    return any(_NO_MEMORY.search(line) for line in lines[-_REASON_LINES:])


def is_secondary(lines: Sequence[str]) -> bool:
    """Return whether a failure looks like a consequence of another rank's end, such as a connection that it closed."""
    return any(_SECONDARY.search(line) for line in lines[-_REASON_LINES:])


def failure_cause(code: int, out_of_memory: bool, rank_bytes: int | None) -> str:
    """Return how a rank ended, for messages.

    Args:
        code: `returncode` of its process.
        out_of_memory: Whether it lacked memory.
        rank_bytes: The plan's estimate of the memory of the fullest rank; None if it is not known.
    """
    killed = code < 0
    how = f"signal {-code} ({_signal_name(-code)})" if killed else f"exit status {code}"
    if not out_of_memory:
        return how
    how += ": killed by the kernel for lack of memory" if killed else ": memory could not be allocated"
    if rank_bytes is not None:
        how += f"; the plan's estimate for the fullest rank is {rank_bytes / 2**30:.2f} GiB"
    return how


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
