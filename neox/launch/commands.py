"""Command lines that start a run: one per host, or one for all hosts where a launcher takes them together."""

from __future__ import annotations

from neox.launch.spec import LaunchSpec


def agent_command(spec: LaunchSpec, node_rank: int | str, *, lifeline: bool) -> list[str]:
    """The command that runs the agent of one host, on that host."""
    return [
        "env",
        f"PYTHONPATH={spec.code_root}",  # the caller's own PYTHONPATH travels in the specification
        spec.python,
        "-m",
        "neox.launch.node",
        spec.encode(),
        f"--node_rank={node_rank}",
        *(["--lifeline"] if lifeline else []),
    ]
