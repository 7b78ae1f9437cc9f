"""One run at a time in a run directory and in a `save` directory; the holder is named; locks end with their owner."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from neox.errors import LaunchError
from neox.launch.run_lock import reserve


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_living_holder_is_named_and_a_dead_one_forgotten(tmp_path: Path, held: ExitStack) -> None:
    run, save = tmp_path / "run", tmp_path / "save"
    hold = (
        "import sys\nfrom contextlib import ExitStack\nfrom pathlib import Path\n"
        "from neox.launch.run_lock import reserve\nheld = ExitStack()\n"
        "reserve(Path(sys.argv[1]), Path(sys.argv[2]), 'train.py', held)\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", hold, str(run), str(save)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    for directory, wanted in ((run, run), (tmp_path / "other", save)):
        with pytest.raises(LaunchError) as error:
            reserve(directory, save, "train.py", held)
        assert str(wanted) in str(error.value)
        assert f"train.py (process {owner.pid} on " in str(error.value)
    aside = reserve(run, save, "generate.py", held)  # reads `save` only
    assert aside.parent == run
    assert aside.name.startswith("generate-")
    owner.kill()
    owner.communicate()
    assert reserve(run, save, "train.py", held) == run
    with pytest.raises(LaunchError):
        reserve(run, save, "train.py", held)


def test_one_directory_for_both_and_none_that_can_be_made(tmp_path: Path, held: ExitStack) -> None:
    assert reserve(tmp_path / "run", tmp_path / "x" / ".." / "run", "train.py", held) == tmp_path / "run"
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError):
        reserve(tmp_path / "file", None, "train.py", held)
