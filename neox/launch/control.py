"""Signalling the agent of a run on this host: `python -m neox.launch.control RUN_ID NODE_RANK SIGNAL`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from neox.errors import run_script
from neox.launch.rendezvous import agent_directory


def main() -> int:
    """Send the signal; an agent that has ended needs none."""
    run_id, node_rank, signum = sys.argv[1:]
    with suppress(FileNotFoundError, ProcessLookupError, ValueError):
        os.kill(int((agent_directory(run_id, int(node_rank)) / "pid").read_text()), int(signum))
    return 0


if __name__ == "__main__":
    run_script(main)
