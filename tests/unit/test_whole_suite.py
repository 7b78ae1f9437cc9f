"""Shards, reports and their table of `make test-all`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import whole_suite
from tests.whole_suite import FileResult, expected_seconds, list_test_files, read_reports, shard_of, summary

ALL_FILES = list_test_files()
PASSING = "def test_one():\n    pass\n\ndef test_two():\n    pass\n"
FAILING_ONCE = """
from pathlib import Path

def test_flag():
    flag = Path({flag!r})
    is_second_run = flag.exists()
    flag.touch()
    assert is_second_run
"""


@pytest.mark.parametrize("shards", [1, 3, 4])
def test_shards_hold_every_file_once_and_are_about_equally_long(shards: int) -> None:
    expected = expected_seconds(ALL_FILES)
    parts = [shard_of(expected, shard, shards) for shard in range(1, shards + 1)]
    assert sorted(name for part in parts for name in part) == sorted(ALL_FILES)
    seconds = [sum(expected[name] for name in part) for part in parts]
    assert max(seconds) - min(seconds) <= max(expected.values())


def checkout(directory: Path, files: dict[str, str]) -> Path:
    """Make a git checkout that holds the script and test files."""
    (directory / "tests").mkdir()
    for name, text in files.items():
        (directory / "tests" / name).write_text(text)
    (directory / "tests/whole_suite.py").write_text(Path(whole_suite.__file__).read_text())
    (directory / "conftest.py").write_text(
        "from hypothesis import settings\nsettings.register_profile('random', settings())\n"
    )
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m tests"):
        subprocess.run(["git", *command.split()], cwd=directory, check=True)
    return directory


def run(directory: Path) -> tuple[int, str, dict[str, list[FileResult]]]:
    """Run the suite of a checkout; return the status, what was printed, and the report."""
    report = directory / "report.jsonl"
    command = [sys.executable, directory / "tests/whole_suite.py", "--jobs", "1", "--report", report]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, read_reports([report])


@pytest.mark.slow
def test_failures_run_again_alone_and_files_that_passed_do_not(tmp_path: Path) -> None:
    files = {
        "test_passing.py": PASSING,
        "test_flaky.py": FAILING_ONCE.format(flag=str(tmp_path / "flag")),
        "test_failing.py": "def test_never():\n    assert False\n",
        "test_broken.py": "import no_such_module\n",
        "test_skipped.py": "import pytest\npytest.importorskip('no_such_module')\n",
    }
    status, printed, results = run(checkout(tmp_path, files))
    assert status == 1
    outcomes = {Path(name).name: [result.failed for result in runs] for name, runs in results.items()}
    assert outcomes == {
        "test_passing.py": [0],
        "test_flaky.py": [1, 0],
        "test_failing.py": [1, 1],
        "test_broken.py": [1, 1],
        "test_skipped.py": [0],
    }
    assert results["tests/test_passing.py"][0].passed == 2
    assert "flaky" in printed

    _, printed, again = run(tmp_path)
    assert "2 of 5 files are left" in printed
    assert len(again["tests/test_passing.py"]) == 1

    (tmp_path / "tests/test_failing.py").write_text(PASSING)
    status, printed, _ = run(tmp_path)
    assert status == 1
    assert "uncommitted" in printed


def test_a_table_needs_every_file_on_one_commit(tmp_path: Path) -> None:
    first = FileResult("a" * 40, "tests/test_a.py", passed=1)
    lines = [first, FileResult("b" * 40, "tests/test_b.py", passed=1)]
    report = tmp_path / "1.jsonl"
    report.write_text("".join(json.dumps(vars(line)) + "\n" for line in lines) + '{"commit": "b')  # killed here
    results = read_reports([report])
    files = ["tests/test_a.py", "tests/test_b.py"]
    assert not summary(results, files)[1]
    assert not summary({"tests/test_a.py": [first]}, files)[1]
    assert summary({"tests/test_a.py": [first]}, files[:1])[1]
