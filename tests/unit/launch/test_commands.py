"""Command lines: what crosses a shell arrives whole, and executes nothing."""

from __future__ import annotations

import base64
import json
import random
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from neox.config.sections.runner import RunnerConfig
from neox.errors import LaunchError
from neox.launch import commands
from neox.launch.commands import (
    agent_command,
    deepspeed_command,
    format_commands,
    host_commands,
    openmpi_command,
    pdsh_environment,
    pdsh_launch,
    printed_commands,
    rank_command,
    slurm_command,
    ssh_command,
    torchrun_command,
)
from neox.launch.launcher_choice import chosen_launcher, launcher_command, launcher_problem
from neox.launch.spec import Host, LaunchSpec

ODD = "a; touch pwned; $(touch pwned) `touch pwned` 'q\" \\ \n -x %h%n"


def spec(**changes: object) -> LaunchSpec:
    """Two hosts with two ranks each."""
    base = LaunchSpec(
        run_id="id",
        hosts=(Host("a", (0, 1)), Host("b", (0, 1))),
        master_addr="10.0.0.1",
        master_port=29512,
        script=f"/some where/{ODD}.py",
        arguments=("--payload", "abc="),
        directory=f"/{ODD}",
        code_root=f"/code {ODD}",
        run_directory="/runs/x",
        python="/opt/venv with space/bin/python",
        environment={"NCCL_ODD": ODD},
        hang_timeout=60.0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_specification_survives_the_journey() -> None:
    encoded = spec().encode()
    assert LaunchSpec.decode(encoded) == spec()
    assert set(encoded) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=")
    with pytest.raises(LaunchError):
        LaunchSpec.decode(encoded[:-9])


def test_ranks_and_hosts() -> None:
    uneven = spec(hosts=(Host("a", (0,)), Host("b", (0, 1, 2)), Host("c", (0, 1))))
    assert uneven.world_size == 6
    assert [uneven.first_rank(node) for node in range(3)] == [0, 1, 4]
    assert [uneven.host_of(rank).name for rank in range(6)] == ["a", "b", "b", "b", "c", "c"]
    assert json.loads(base64.urlsafe_b64decode(uneven.world_info)) == {"a": [0], "b": [0, 1, 2], "c": [0, 1]}


def test_pdsh_hands_every_word_over_unchanged(tmp_path: Path) -> None:
    """A stand-in for pdsh and the remote login shell: expand as pdsh does, then let a real shell run the line."""
    command = pdsh_launch(spec())
    assert command[:-1] == ["pdsh", "-S", "-R", "ssh", "-f", "2", "-w", "a,b"]
    line = command[-1].replace("%%", "\0").replace("%n", "1").replace("%h", "HOST").replace("\0", "%")
    printed = line.replace("exec env", 'exec printf "%s\\0"', 1)
    output = subprocess.run(["sh", "-c", printed], capture_output=True, cwd=tmp_path, check=True).stdout.decode()
    assert output.split("\0")[:-1] == agent_command(spec(), 1, lifeline=True)[1:]
    assert not list(tmp_path.iterdir())


def test_ssh_asks_nothing_and_uses_the_port() -> None:
    environment = pdsh_environment({"PDSH_SSH_ARGS_APPEND": "-F x"}, 2222)
    assert "-oBatchMode=yes" in environment["PDSH_SSH_ARGS_APPEND"]
    assert environment["PDSH_SSH_ARGS_APPEND"].endswith("-p2222 -F x")
    command = ssh_command(Host("a", (0,)), ["echo", ODD], 2222)
    assert command[-3:-1] == ["--", "a"]
    assert shlex.split(command[-1]) == ["echo", ODD]


def test_a_command_too_long_for_the_system_is_refused() -> None:
    with pytest.raises(LaunchError):
        pdsh_launch(spec(environment={"NCCL_X": random.Random(0).randbytes(100_000).hex()}))


def test_ranks_and_the_same_ranks_under_deepspeeds_launcher() -> None:
    assert rank_command(spec())[-3:] == [spec().script, *spec().arguments]
    command = deepspeed_command(spec(), 1)
    assert command[1:3] == ["-m", "deepspeed.launcher.launch"]
    assert {"--node_rank=1", "--master_addr=10.0.0.1", "--master_port=29512"} <= set(command)


def test_every_host_has_its_exact_command() -> None:
    many = spec(hosts=tuple(Host(f"h{number}", tuple(range(8))) for number in range(512)))
    shown = host_commands(many, "pdsh")
    assert [line.host for line in shown] == [host.name for host in many.hosts]
    for number in (0, 511):
        assert shlex.split(shown[number].command) == agent_command(many, number, lifeline=True)
    assert shlex.split(host_commands(many, "slurm")[1].command) == agent_command(many, "auto", lifeline=True)
    assert launcher_command(many, RunnerConfig()) == pdsh_launch(many)
    assert launcher_command(many, RunnerConfig(launcher="none")) is None
    text = "\n".join(format_commands(many, "pdsh"))
    assert "on h0: env " in text
    assert "--node_rank 1 to 511" in text
    assert len(text) < 2000
    text = "\n".join(format_commands(many, "slurm"))  # the line is the same everywhere
    assert "511 more hosts" in text
    assert "--node_rank 1" not in text
    two = spec(hosts=many.hosts[:2])
    assert "--node_rank 1\n" in "\n".join(format_commands(two, "pdsh"))


def test_slurm_and_openmpi() -> None:
    command = slurm_command(spec(), comment="why; not", account="me")
    start = command.index("env")
    assert command[:start] == [
        "srun",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--nodelist=a,b",
        "--kill-on-bad-exit=1",
        "--input=all",
        "--gpus-per-node=2",
        "--comment=why; not",
        "--account=me",
        "--export=ALL",
    ]
    assert command[start:] == agent_command(spec(), "auto", lifeline=True)
    command = openmpi_command(spec())
    assert command[: command.index("env")] == ["mpirun", "-n", "2", "--host", "a,b", "--map-by", "ppr:1:node"]
    words = launcher_command(spec(), RunnerConfig(launcher="slurm", launcher_args="--partition='a b' --mem=0"))
    assert words is not None
    assert words[words.index("--export=ALL") - 2 :][:2] == ["--partition=a b", "--mem=0"]
    words = launcher_command(spec(), RunnerConfig(launcher="OpenMPI", launcher_args="--mca btl ^openib"))
    assert words is not None
    assert words[words.index("env") - 3 : words.index("env")] == ["--mca", "btl", "^openib"]
    with pytest.raises(LaunchError):
        slurm_command(spec(hosts=(Host("a", (0,)), Host("b", (0, 1)))))


def test_launchers_and_arguments_that_are_refused() -> None:
    for keys in ({"launcher": "MPICH"}, {"launcher": "impi"}, {"launcher": "slurm", "launcher_args": "'--mem"}):
        with pytest.raises(ValidationError):
            RunnerConfig(**keys)


def test_deepspeeds_launcher_gets_the_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "visible_accelerators", lambda: (4, 5, 6))
    command = deepspeed_command(spec(hosts=(Host("localhost", (0, 2)), Host("far.example.org", (0, 2)))))
    (info,) = (word.partition("=")[2] for word in command if word.startswith("--world_info="))
    assert json.loads(base64.urlsafe_b64decode(info)) == {"localhost": [4, 6], "far.example.org": [0, 2]}


def test_slurm_is_asked_for_gpus_where_it_knows_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks_for_gpus() -> bool:
        command = launcher_command(spec(), RunnerConfig(launcher="slurm"))
        assert command is not None
        return "--gpus-per-node=2" in command

    for name in ("SLURM_JOB_ID", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert asks_for_gpus()  # srun makes the allocation
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert not asks_for_gpus()
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert asks_for_gpus()


def test_none_prints_lines_that_a_shell_reads_back() -> None:
    lines = printed_commands(spec(), ("WANDB_API_KEY",))
    assert "WANDB_API_KEY" in lines[0]
    ours = [line for line in lines if "neox.launch.agent.host_agent" in line]
    assert len(ours) == 2
    words = shlex.split("\n".join(lines), comments=True)
    assert words[:2] == ["cd", spec().directory]
    command = agent_command(spec(), 0, lifeline=False, plain=True)
    assert words[3 : 3 + len(command)] == command
    assert torchrun_command(spec(), 0)[-3:] == [spec().script, "--payload", "abc="]
    assert not any(
        "torch.distributed.run" in line for line in printed_commands(spec(hosts=(Host("a", (0,)), Host("b", (0, 1)))))
    )


def test_which_launcher() -> None:
    here, there = (Host("localhost", (0, 1)),), spec().hosts
    assert chosen_launcher(here, RunnerConfig()) == "local"
    assert chosen_launcher(here, RunnerConfig(force_multi=True)) == "pdsh"
    assert chosen_launcher(here, RunnerConfig(launcher="none")) == "none"
    assert chosen_launcher(there, RunnerConfig()) == "pdsh"
    assert chosen_launcher((Host("far", (0,)),), RunnerConfig()) == "pdsh"


def test_launchers_that_cannot_start_the_ranks() -> None:
    here, there = (Host("localhost", (0, 1)),), spec().hosts
    assert launcher_problem(here, RunnerConfig(), "/nowhere") is None
    assert "a, b" in str(launcher_problem(there, RunnerConfig(launcher="local")))
    uneven = (Host("a", (0,)), Host("b", (0, 1)))
    assert "num_gpus" in str(launcher_problem(uneven, RunnerConfig(launcher="slurm")))
    assert launcher_problem(there, RunnerConfig()) is None
    assert "program pdsh" in str(launcher_problem(there, RunnerConfig(), "/nowhere"))
