"""What children get, what travels, and what never does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from neox.errors import ConfigError
from neox.launch.environment import (
    child_environment,
    environment_file,
    forwarded_environment,
    forwarded_secrets,
    is_secret,
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


def test_deepspeeds_environment_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment_file({"HOME": str(tmp_path)}) == {}
    (tmp_path / ".deepspeed_env").write_text('# for NCCL\n\nNCCL_DEBUG=INFO\nODD=a=b; $(x) "y"\n')
    expected = {"NCCL_DEBUG": "INFO", "ODD": 'a=b; $(x) "y"'}
    assert environment_file({}) == expected
    (tmp_path / "other").write_text("no equals sign, hush\n")
    with pytest.raises(ConfigError) as error:
        environment_file({"DS_ENV_FILE": str(tmp_path / "other")})
    assert "other:1" in str(error.value)
    assert "hush" not in str(error.value)
    (tmp_path / "other").write_bytes(b"A=\xff")
    with pytest.raises(ConfigError) as error:
        environment_file({"DS_ENV_FILE": str(tmp_path / "other")})
    assert "UTF-8" in str(error.value)
    with pytest.raises(ConfigError):
        environment_file({"DS_ENV_FILE": "none"})


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
