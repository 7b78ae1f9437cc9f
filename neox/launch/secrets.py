"""Secrets on their way to other hosts: through ssh's standard input into a private file that the agent takes away.

`python -m neox.launch.secrets RUN_ID NODE_RANK` writes the JSON object from standard input. Command lines, which
everyone on a host can read, and logs never hold them.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from neox.errors import LaunchError, run_script
from neox.launch.commands import ssh_command
from neox.launch.environment import withheld_secrets
from neox.launch.rendezvous import agent_directory
from neox.launch.spec import LaunchSpec

_SECONDS = 15
_AT_ONCE = 128


def deliver_secrets(
    spec: LaunchSpec, environment: Mapping[str, str], patterns: Sequence[str], ssh_port: int | None
) -> tuple[str, ...]:
    """Hand the secrets among the forwarded variables to every host; returns their names. Raises LaunchError."""
    names = withheld_secrets(environment, patterns)
    if names:
        text = json.dumps({name: environment[name] for name in names})
        with ThreadPoolExecutor(min(_AT_ONCE, len(spec.hosts))) as pool:
            jobs = [pool.submit(_deliver, spec, node, text, environment, ssh_port) for node in range(len(spec.hosts))]
            for job in jobs:
                job.result()
    return names


def _deliver(spec: LaunchSpec, node: int, text: str, environment: Mapping[str, str], ssh_port: int | None) -> None:
    words = ["env", f"PYTHONPATH={spec.code_root}", spec.python, "-m", "neox.launch.secrets", spec.run_id, str(node)]
    command = ssh_command(spec.hosts[node], words, ssh_port)
    command[1:1] = shlex.split(environment.get("PDSH_SSH_ARGS_APPEND", ""))
    name = spec.hosts[node].name
    try:
        done = subprocess.run(
            command, env=dict(environment), input=text, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"secrets could not be handed to {name}: no answer within {_SECONDS} s") from None
    if done.returncode:
        raise LaunchError(f"secrets could not be handed to {name}: {done.stderr.strip()[-300:]}")


def take_secrets(run_id: str, node_rank: int) -> dict[str, str]:
    """Read and remove what was handed to this host."""
    path = _file(run_id, node_rank)
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    path.unlink()
    found: dict[str, str] = json.loads(text)
    return found


def _file(run_id: str, node_rank: int) -> Path:
    return agent_directory(run_id, node_rank).with_suffix(f".{node_rank}.secrets")


def main() -> int:
    """Write standard input to a file that only this user can read."""
    run_id, node_rank = sys.argv[1:]
    handle = os.open(_file(run_id, int(node_rank)), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "w") as file:
        file.write(sys.stdin.read())
    return 0


if __name__ == "__main__":
    run_script(main)
