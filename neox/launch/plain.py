"""A node agent's events for people, where no head process listens (`launcher: none`)."""

from __future__ import annotations

import sys
from collections import defaultdict

from neox.launch.events import Event
from neox.launch.lifeline import exit_status


class PlainOutput:
    """Prints what ranks show as it comes, and the last words of ranks that fail."""

    def __init__(self) -> None:
        self.tails: defaultdict[int, str] = defaultdict(str)

    def take(self, event: Event) -> None:
        """Print one event, if it says something to people."""
        end = "" if event.get("more") else "\n"
        if event["kind"] == "line":
            print(event["text"], end=end, file=sys.stdout if event["stream"] == "out" else sys.stderr, flush=True)
        elif event["kind"] == "tail":
            self.tails[event["rank"]] += event["text"] + end
        elif event["kind"] == "exit" and event["code"] != 0:
            words = self.tails[event["rank"]]
            status = exit_status(event["code"])
            print(f"error: rank {event['rank']} ended with status {status}; its last words:\n{words}", file=sys.stderr)
        elif event["kind"] == "hang":
            print(f"no rank here got on for {event['seconds']:.0f} s (hang_timeout)", file=sys.stderr)
