"""Why a rank has failed, read from its exit status and its last lines."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

_RANK_MARK = re.compile(r"\[rank\d+\]: ?")  # torch.distributed writes it before each line of a traceback
_START = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_CPP_ABORT = "terminate called"  # by an exception of C++; its text follows after `what():`
_PYTHON_ABORT = "Fatal Python error: Aborted"  # of the same process, then: the stacks of its threads
_FATAL = ("Fatal Python error:", _CPP_ABORT, "Segmentation fault")
_WHAT = re.compile(r"^\s*what\(\):\s*")
_FRAMES = "Exception raised from"  # what follows in the text of an exception of torch's C++
_ERROR = "error: "  # what `neox.errors.run_script` writes before a message
_SECONDARY = re.compile(
    r"Connection (reset|closed) by peer|Connection refused|Broken pipe|remote process exited|Socket Timeout"
    r"|NCCL (error|communicator was aborted)|Software caused connection abort|recvValue failed"
    r"|store is being destroyed",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(r"^MemoryError|can't allocate memory|std::bad_alloc|out of memory", re.IGNORECASE)
EXIT_HANG = 124
"""Exit status of a run whose ranks made no progress."""
_MAX_LINES = 20
_REASON_LINES = 8  # at the end, where the message of an exception stands


def failure_text(lines: Sequence[str]) -> list[str]:
    """Return the last failure among the lines: an error, a crash, or a traceback with the exceptions it is chained to.

    Args:
        lines: Last lines of the rank's stderr.

    Returns:
        The lines of the failure; the last lines if none of them begins a failure.
    """
    plain = [without_rank_mark(line) for line in lines]
    begins = [number for number, line in enumerate(plain) if begins_failure(line)]
    if not begins:
        return list(lines[-_MAX_LINES:])
    first = begins.pop()
    if is_error_message(plain[first]) and len(lines) - first > _MAX_LINES:  # an old line that only looks like an error
        return list(lines[-_MAX_LINES:])
    while begins and (_has_chain_mark(plain[begins[-1] : first]) or _is_one_abort(plain[begins[-1]], plain[first])):
        first = begins.pop()
    return list(lines[first:])


def begins_failure(line: str) -> bool:
    """Return whether a line on stderr is the first of a failure: a traceback, a crash, or the message of an error."""
    text = without_rank_mark(line)
    return text.strip() == _START or text.startswith((*_FATAL, _ERROR))


def is_error_message(line: str) -> bool:
    """Return whether a line is the first of a message that a script wrote for the user before it ended."""
    return without_rank_mark(line).startswith(_ERROR)


def without_rank_mark(line: str) -> str:
    """Return a line without the `[rank3]: ` that torch.distributed writes before the lines of a traceback."""
    return _RANK_MARK.sub("", line, count=1) if line.startswith("[rank") else line


def _has_chain_mark(lines: Sequence[str]) -> bool:
    """Return whether one of the lines says that the next traceback belongs to the one before."""
    return any(line.startswith(_CHAINED) for line in lines)


def _is_one_abort(earlier: str, later: str) -> bool:
    """Return whether two lines begin what C++ and Python say about one abort of the process."""
    return earlier.startswith(_CPP_ABORT) and later.startswith((_CPP_ABORT, _PYTHON_ABORT))


def lacks_memory(lines: Sequence[str]) -> bool:
    """Return whether the last lines of a rank say that memory could not be allocated, on a CPU or a GPU."""
    return any(_NO_MEMORY.search(line) for line in _reason_lines(lines))


def is_secondary(lines: Sequence[str]) -> bool:
    """Return whether a failure looks like a consequence of another rank's end, such as a connection that it closed."""
    return any(_SECONDARY.search(line) for line in _reason_lines(lines))


def cpp_message(lines: Sequence[str]) -> str | None:
    """Return the text of the C++ exception that ended a rank, its first line; None if none did."""
    message = _cpp_message_lines(lines)
    return message[0] if message else None


def _reason_lines(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines of a failure that say why: the text of a C++ exception, else the last lines."""
    return _cpp_message_lines(lines) or lines[-_REASON_LINES:]


def _cpp_message_lines(lines: Sequence[str]) -> list[str]:
    """Return the text of the C++ exception that ended a rank, without its stack."""
    if not lines or not without_rank_mark(lines[0]).startswith(_CPP_ABORT):
        return []
    message: list[str] = []
    for line in map(without_rank_mark, lines[1:]):
        if message and (line.startswith((_FRAMES, _PYTHON_ABORT)) or not line.strip()):
            break
        if message or _WHAT.match(line):
            message.append(_WHAT.sub("", line))
    return message


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
