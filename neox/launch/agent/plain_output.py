"""Output of an agent whose events no launcher process reads (`launcher: none`)."""

from __future__ import annotations

import sys
from collections import defaultdict

from neox.launch.events import Event
from neox.launch.spec import LaunchSpec
from neox.launch.supervisor.outcome import Failure, explain, shortened


class PlainOutput:
    """Printer of an agent's events for people.

    Args:
        spec: The run.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._tails: defaultdict[int, str] = defaultdict(str)

    def take(self, event: Event) -> None:
        """Print an event: each line at once, and the last lines of ranks that fail."""
        end = "" if event.get("more") else "\n"
        if event["kind"] == "line":
            stream = sys.stdout if event["stream"] == "out" else sys.stderr
            print(event["text"], end=end, file=stream, flush=True)
        elif event["kind"] == "tail":
            self._tails[event["rank"]] += event["text"] + end
        elif event["kind"] == "exit" and event["code"] != 0:
            self._explain(Failure.of_event(event, self._tails[event["rank"]]))
        elif event["kind"] == "hang":
            print(f"no rank here made progress for {event['seconds']:.0f} s (hang_timeout)", file=sys.stderr)

    def _explain(self, failure: Failure) -> None:
        """Print the last lines of a rank; one line if they look like the consequence of another rank's failure."""
        if failure.is_consequence():
            log = self._spec.log_path(failure.rank)
            why = shortened(failure.message) or "killed"
            print(f"rank {failure.rank} ended, probably because another rank did: {why} (log: {log})", file=sys.stderr)
            return
        for line in explain(self._spec, failure, [failure]):
            print(line, file=sys.stderr)
