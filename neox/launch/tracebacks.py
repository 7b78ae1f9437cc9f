"""Finding the words that explain a failure in the last lines a process wrote."""

from __future__ import annotations

import re
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
_LINES_WITHOUT_TRACEBACK = 20


def explain(lines: Sequence[str]) -> list[str]:
    """Return the last traceback among `lines` with the exceptions it is chained to; without one, the last lines."""
    starts = [number for number, line in enumerate(lines) if line.strip() == _START]
    fatal = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    if fatal and (not starts or fatal[-1] > starts[-1]):
        return list(lines[fatal[-1] :])
    if not starts:
        return list(lines[-_LINES_WITHOUT_TRACEBACK:])
    first = starts[-1]
    for earlier in reversed(starts[:-1]):
        if not any(line.startswith(_CHAINED) for line in lines[earlier:first]):
            break
        first = earlier
    return list(lines[first:])


def is_secondary(lines: Sequence[str]) -> bool:
    """Whether a failure reads like the consequence of another rank's death: its peer closed the connection."""
    return any(_SECONDARY.search(line) for line in lines[-8:])
