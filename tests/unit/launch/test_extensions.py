"""The build ahead of time: done once, never stopped by a lock whose owner is gone, never disturbing a living one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from neox.errors import LaunchError
from neox.launch import extensions
from neox.launch.extensions import break_stale_lock, build, is_built, versions

NAME = "deepspeed_shm_comm"
FAKE_BUILD = """
import os, pathlib, time
target = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "deepspeed_shm_comm"
assert not (target / "lock").exists()
with open(target / "builds", "a") as file:
    file.write("x")
time.sleep(0.3)
(target / "deepspeed_shm_comm.so").touch()
"""


def test_a_stale_lock_is_broken_and_a_living_one_is_not(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert not break_stale_lock(lock)
    hold = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); sys.stdin.read()"
    owner = subprocess.Popen(
        [sys.executable, "-c", hold, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    assert not break_stale_lock(lock)
    owner.kill()
    owner.communicate()
    assert lock.exists()
    assert break_stale_lock(lock)
    assert not lock.exists()


def test_one_build_for_many_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "_BUILD", FAKE_BUILD)
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "lock").touch()  # left by a build that was killed
    assert not is_built(tmp_path)
    threads = [threading.Thread(target=build, args=(tmp_path,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / NAME / "builds").read_text() == "x"
    assert is_built(tmp_path)
    stamp = tmp_path / NAME / "neox_built.json"
    stamp.write_text(json.dumps({"versions": {**versions(), "torch": "1.0"}}))
    assert not is_built(tmp_path)


def test_failures_and_machines_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "_BUILD", "import sys; print('no compiler here'); sys.exit(1)")
    with pytest.raises(LaunchError, match="no compiler here"):
        build(tmp_path)
    assert not is_built(tmp_path)
    monkeypatch.setattr(extensions, "_BUILD", "import sys; sys.exit(3)")
    build(tmp_path)
    assert is_built(tmp_path)  # known not to be possible: not tried at every start


def test_the_directory_lies_inside_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert extensions.extensions_directory() == Path(sys.prefix) / "torch_extensions"
    assert os.environ.get("TORCH_EXTENSIONS_DIR") is None
