"""What children get, what travels, and what never does."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from neox.errors import ConfigError
from neox.launch.environment import (
    child_environment,
    complete_on_host,
    environment_file,
    forwarded_environment,
    forwarded_secrets,
    is_secret,
    launch_environment,
    remove_stale_locks,
)


def test_children_get_this_interpreter_first() -> None:
    bin_directory = str(Path(sys.executable).parent)
    environment = child_environment({"PATH": f"/usr/bin:{bin_directory}"})
    assert environment["PATH"] == f"{bin_directory}:/usr/bin"
    assert environment["TORCH_EXTENSIONS_DIR"] == str(Path(sys.prefix) / "torch_extensions")
    assert child_environment({"TORCH_EXTENSIONS_DIR": "/mine"})["TORCH_EXTENSIONS_DIR"] == "/mine"


def test_the_default_list() -> None:
    environment = {
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": "/hf",
        "HF_TOKEN": "hush",
        "WANDB_API_KEY": "hush",
        "WANDB_MODE": "offline",
        "TORCH_LOGS": "x",
        "DS_ACCELERATOR": "cpu",
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/lib",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "0",
        "HOME": "/root",
        "SSH_AUTH_SOCK": "/x",
    }
    chosen = forwarded_environment(environment)
    assert set(environment) - set(chosen) == {
        "HF_TOKEN",
        "WANDB_API_KEY",
        "CUDA_VISIBLE_DEVICES",
        "HOME",
        "SSH_AUTH_SOCK",
    }
    assert forwarded_secrets(environment) == ("HF_TOKEN", "WANDB_API_KEY")


def test_an_own_list_and_secrets_by_name() -> None:
    assert forwarded_environment({"MY_A": "1", "MY_KEY": "2", "NCCL_X": "3"}, ["MY_*"]) == {"MY_A": "1"}
    for name in ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET", "DB_PASSWORD", "MY_CREDENTIALS"):
        assert is_secret(name)
    for name in ("PATH", "TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "KEYBOARD"):
        assert not is_secret(name)


def write_environment(directory: Path, text: str) -> Path:
    """Write DeepSpeed's file of variables."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".deepspeed_env"
    path.write_text(text)
    return path


def test_deepspeeds_files_are_read_in_both_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    home = {"HOME": str(tmp_path / "home"), "LD": "/ld"}
    assert environment_file(home) == {}
    write_environment(tmp_path / "home", "A=home\nB=home\nC=/h:$LD\n")
    assert environment_file(home) == {"A": "home", "B": "home", "C": "/h:/ld"}
    write_environment(tmp_path / "here", "B=here\nD=$A\n")
    assert environment_file(home) == {"A": "home", "B": "here", "C": "/h:/ld", "D": "home"}
    same = {"HOME": str(tmp_path / "here"), "B": "x"}
    write_environment(tmp_path / "here", "B=here:$B\n")
    assert environment_file(same) == {"B": "here:x"}  # once
    monkeypatch.chdir(tmp_path)
    assert environment_file({**home, "DS_ENV_FILE": ".deepspeed_env"})["A"] == "home"
    (tmp_path / "other").write_text("X=1\n")
    assert environment_file({**home, "DS_ENV_FILE": "other"}) == {"X": "1"}
    assert environment_file({**home, "DS_ENV_FILE": str(tmp_path / "other")}) == {"X": "1"}


def test_files_that_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    for text, place in (
        ("no equals sign, hush\n", "other:1"),
        ("A=1\n\nB=$(hush)\n", "other:3"),
        ("A=1\nCUDA_VISIBLE_DEVICES=0\n", "other:2"),
        ("MASTER_PORT=29500\n", "master_port"),
    ):
        other.write_text(text)
        with pytest.raises(ConfigError) as error:
            environment_file({"DS_ENV_FILE": str(other)})
        assert place in str(error.value)
        assert "hush" not in str(error.value)
    other.write_bytes(b"A=\xff")
    with pytest.raises(ConfigError) as error:
        environment_file({"DS_ENV_FILE": str(other)})
    assert "UTF-8" in str(error.value)
    with pytest.raises(ConfigError):
        environment_file({"DS_ENV_FILE": "none"})


def test_what_only_a_host_knows_is_filled_in_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NCCL_A", "a")
    monkeypatch.setattr(socket, "gethostname", lambda: "launcher")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/ld")
    write_environment(
        tmp_path,
        "LD_LIBRARY_PATH=/opt:$LD_LIBRARY_PATH\nDIR=/scratch/$HOSTNAME\nCACHE=$DIR/$NCCL_A\nMY_KEY=$HOSTNAME\n",
    )
    found = launch_environment()
    assert found.variables["LD_LIBRARY_PATH"] == "/opt:/ld"
    assert found.variables["CACHE"] == "/scratch/launcher/a"
    assert found.of_hosts == {"DIR": "/scratch/$HOSTNAME", "CACHE": "$DIR/$NCCL_A"}
    assert set(found.forwarded) > {"LD_LIBRARY_PATH", "DIR", "CACHE"}
    monkeypatch.setattr(socket, "gethostname", lambda: "worker-1")
    on_host = {"NCCL_A": "a", "DIR": "/scratch/launcher"}
    assert complete_on_host(found.of_hosts, on_host) == {"DIR": "/scratch/worker-1", "CACHE": "/scratch/worker-1/a"}


def test_a_stale_build_lock_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    assert remove_stale_locks(tmp_path) == []
    (tmp_path / "cpu_adam").mkdir()
    lock = tmp_path / "cpu_adam" / "lock"
    hold = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); sys.stdin.read()"
    owner = subprocess.Popen(
        [sys.executable, "-c", hold, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    assert remove_stale_locks(tmp_path) == []
    owner.kill()
    owner.communicate()
    assert lock.exists()
    assert remove_stale_locks(tmp_path) == [lock]
    assert not lock.exists()


def test_the_home_of_another_user_is_not_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    is_file = Path.is_file

    def refuse(path: Path) -> bool:
        if path.parent.name == "root":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert environment_file({"HOME": "/root"}) == {}
    (tmp_path / ".deepspeed_env").write_text("A=1\n")
    assert environment_file({"HOME": "/root"}) == {"A": "1"}
