"""The commands of a run for people and programs: what starts each host's part of it, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import join, quote

from neox.launch.commands import agent_command, deepspeed_launch, torchrun_command
from neox.launch.spec import LaunchSpec

_ELIDED = 80


@dataclass(frozen=True)
class HostCommand:
    """A shell line that runs on a host."""

    host: str
    command: str


def host_commands(spec: LaunchSpec, launcher: str) -> list[HostCommand]:
    """For every host the line that starts its agent there under a launcher (`local`, `pdsh`, `slurm`, ...).

    Lines differ in `--node_rank`; srun and mpirun run one line everywhere, whose agent asks them for its number.
    """
    counted = launcher in ("slurm", "openmpi")
    words = agent_command(
        spec, "auto" if counted else 0, lifeline=launcher in ("local", "pdsh"), plain=launcher == "none"
    )
    place = next(index for index, word in enumerate(words) if word.startswith("--node_rank="))
    before, after = join(words[:place]), "".join(f" {quote(word)}" for word in words[place + 1 :])
    if launcher == "none":
        before = f"cd {quote(spec.directory)} && {before}"
    return [
        HostCommand(host.name, f"{before} --node_rank={'auto' if counted else number}{after}")
        for number, host in enumerate(spec.hosts)
    ]


def deepspeed_command(spec: LaunchSpec) -> str:
    """What the first host's agent starts for its part; other hosts' differ in --node_rank. (The agent adds a keeper
    between the launcher and each rank, for its log and its exit status.)"""
    return join([*deepspeed_launch(spec, 0), spec.script, *spec.arguments])


def torchrun_line(spec: LaunchSpec) -> str | None:
    """The same ranks under torchrun on the first host; None where hosts differ in slots, which torchrun cannot do."""
    if len({len(host.slots) for host in spec.hosts}) > 1:
        return None
    return f"cd {quote(spec.directory)} && " + join(["env", f"PYTHONPATH={spec.code_root}", *torchrun_command(spec, 0)])


def printed_commands(spec: LaunchSpec, secrets: tuple[str, ...] = ()) -> list[str]:
    """`launcher: none`: what to run on each host, ours (supervised) and torchrun's, as shell lines with comments.

    secrets: names of variables that are meant to travel and must not stand in a command.
    """
    lines = []
    if secrets:
        lines.append(f"# no secrets here: set {', '.join(secrets)} in the environment of these commands on each host")
    for line in host_commands(spec, "none"):
        lines += [f"# on {line.host}", line.command]
    if (under_torchrun := torchrun_line(spec)) is not None:
        lines += [
            "# or, under torchrun, with --node_rank counting up from 0: without our supervision, and nothing keeps",
            "# other runs out of this one's directories",
            under_torchrun,
        ]
    return lines


def format_commands(spec: LaunchSpec, launcher: str) -> list[str]:
    """Lines of a plan's text: the first host's command, how the others differ, what it starts; long words cut."""
    lines = host_commands(spec, launcher)
    text = [f"on {lines[0].host}: {_cut(lines[0].command)}"]
    if more := len(lines) - 1:
        same = f"on {more} more host{'s' * (more > 1)} the same"
        number = "" if lines[0].command == lines[1].command else " with --node_rank 1" + f" to {more}" * (more > 1)
        text.append(same + number)
    text.append(f"which starts: {_cut(deepspeed_command(spec))}")
    text.append("(long words are cut here; --json has every host's command whole)")
    return text


def _cut(command: str) -> str:
    words = command.split(" ")
    return " ".join(word if len(word) <= _ELIDED else f"{word[:32]}...({len(word):,} characters)" for word in words)
