"""Commands of containers: their words, by engine, and what is refused before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from neox.errors import ConfigError
from tests.errors import raises_naming
from tools.cluster.containers import Container, split_command
from tools.cluster.every_host import named_hosts, run_on_hosts

HOSTS = ("worker-1", "me@worker-2")


def container(engine="docker", **fields):
    about = {"image": "neox:cuda", "source": Path("/home/user/neox"), "command": ("python", "train.py"), "user": "7:8"}
    return Container(engine, **{**about, **fields})


def test_what_docker_is_asked_for():
    more = {"mounts": ("/data:/d:ro", "/scratch"), "variables": ("NCCL_DEBUG=INFO",)}
    words = container(rdma=True, **more).start("x", HOSTS, 0)
    assert words[:2] == ["docker", "run"]
    assert words[-3:] == ["neox:cuda", "python3", "train.py"]
    options = words[2:-3]
    for expected in (
        *("--rm", "--name=x", "--network=host", "--ipc=host", "--user=7:8", "--env=NCCL_DEBUG=INFO"),
        *("--volume=/home/user/neox:/home/user/neox", "--volume=/data:/d:ro", "--volume=/scratch:/scratch"),
        *("--workdir=/home/user/neox", "--device=/dev/infiniband", "--ulimit=memlock=-1"),
    ):
        assert expected in options
    assert options[options.index("--gpus") + 1] == "all"
    plain = container(gpus=False, shm_size="16g").start("x", HOSTS, 0)
    assert "--shm-size=16g" in plain
    assert not {"--gpus", "--ipc=host", "--device=/dev/infiniband"} & {*plain}


def test_podman_and_apptainer():
    podman = container("/opt/bin/podman").start("x", HOSTS, 1)
    assert podman[0] == "/opt/bin/podman"
    assert {"--userns=keep-id", "nvidia.com/gpu=all"} <= {*podman}
    apptainer = container("apptainer", image="neox.sif", rdma=True).start("x", HOSTS, 1)
    assert apptainer[:3] == ["apptainer", "exec", "--nv"]
    assert "--bind=/home/user/neox:/home/user/neox" in apptainer
    assert apptainer[-3:] == ["neox.sif", "python3", "train.py"]
    assert container("apptainer").stop("x") is None
    assert container().stop("x") == ["docker", "rm", "--force", "x"]


def test_places_and_odd_words_stay_single_words():
    odd = "a b; $(touch pwned) 'x' {node}"
    words = container(command=("run", odd, "{host}:{master}:{nodes}")).start("x", ("u@a", "b"), 1)
    assert words[-3:] == ["run", odd.replace("{node}", "1"), "b:a:2"]


def test_a_wheel_is_installed_before_the_command():
    words = container(wheel=Path("/w/neox.whl"), python="/opt/py/bin/python").start("x", HOSTS, 0)
    place = words.index("neox:cuda")
    assert words[place + 1] == "/opt/py/bin/python"
    assert words[-3:] == ["/w/neox.whl", "/opt/py/bin/python", "train.py"]
    assert "--volume=/w/neox.whl:/w/neox.whl:ro" in words


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"engine": "/usr/bin/lxc"}, "--engine"),
        ({"image": "--privileged"}, "--image"),
        ({"command": ()}, "--cmd"),
        ({"command": ("run", "{rank}")}, "rank"),
        ({"mounts": ("data",)}, "--mount data"),
        ({"mounts": ("/a:/b:rw:x",)}, "--mount"),
        ({"variables": ("A",)}, "--env A"),
        ({"variables": ("WANDB_API_KEY=sesame",)}, "WANDB_API_KEY"),
        ({"shm_size": "lots"}, "--shm-size"),
        ({"engine": "apptainer", "shm_size": "1g"}, "--shm-size"),
    ],
)
def test_what_is_refused(fields, named):
    with pytest.raises(ConfigError, match=named) as refused:
        container(**fields)
    assert "sesame" not in str(refused.value)


def test_a_command_line_is_words_and_no_more():
    assert split_command("python 'a b.py' --set x='[1, 2]' #1") == ("python", "a b.py", "--set", "x=[1, 2]", "#1")
    for text in ("a 'b", "a && b", "a | tee log", "a > log", "a; b"):
        with raises_naming(ConfigError, "--cmd"):
            split_command(text)


def test_hosts_by_name_and_by_file(tmp_path):
    file = tmp_path / "hostfile"
    file.write_text("worker-1 slots=8\nworker-2 slots=8\n")
    assert named_hosts(str(file)) == ("worker-1", "worker-2") == named_hosts("worker-1, worker-2")
    assert named_hosts(None) == ("localhost",)
    for text in ("-oProxyCommand=x", "a,a", "", str(tmp_path / "none"), "no_hostfile", "none.txt"):
        with pytest.raises(ConfigError):
            named_hosts(text)


def test_the_first_failure_ends_the_others(capsys):
    ended = []
    commands = {"a": ["sh", "-c", "echo up; exit 3"], "b": ["sleep", "60"]}
    assert run_on_hosts(commands, {"PATH": "/usr/bin:/bin"}, end_all=lambda: ended.append(True)) == 3
    assert ended == [True]
    shown = capsys.readouterr()
    assert "a: up" in shown.out
    assert "a: ended with status 3" in shown.err


def test_every_host_is_waited_for(capsys):
    commands = {"a": ["false"], "b": ["sh", "-c", "sleep 0.5; echo done"]}
    assert run_on_hosts(commands, {"PATH": "/usr/bin:/bin"}) == 1
    assert "b: done" in capsys.readouterr().out


def test_a_mount_that_is_missing_is_refused_before_a_container_starts(tmp_path):
    engine = tmp_path / "docker"
    engine.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    engine.chmod(0o755)
    for mounts, status in ((["--mount", f"{tmp_path}/none:/data"], 2), (["--mount", str(tmp_path)], 0)):
        flags = ["--engine", str(engine), "--image", "x", "--cmd", "ls", "--src", str(tmp_path), *mounts]
        tool = str(Path(__file__).parents[4] / "tools" / "launch_container.py")
        done = subprocess.run([sys.executable, tool, *flags], capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert (tmp_path / "started").exists() == (status == 0)
        assert ("none" in done.stdout) == (status == 2)


def test_a_flag_of_the_tool_after_the_command_is_refused(tmp_path):
    tool = str(Path(__file__).parents[4] / "tools" / "cluster.py")
    command = ["touch", str(tmp_path / "made"), "--dry-run"]
    done = subprocess.run([sys.executable, tool, "run", "-H", "localhost", *command], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--dry-run stands after the command" in done.stderr
    assert not (tmp_path / "made").exists()


def test_a_directory_of_no_run_is_a_usage_error(tmp_path):
    tool = Path(__file__).parents[4] / "tools" / "cluster.py"
    done = subprocess.run([sys.executable, str(tool), "kill", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "command.txt" in done.stderr
