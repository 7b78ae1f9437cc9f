"""Every script of the project: help, version, completion, Ctrl-C while it starts, and what ends it."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from neox.arguments import ScriptParser
from neox.errors import DataError, needs_package, os_errors, run_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.py"), *ROOT.glob("tools/*.py"), *ROOT.glob("tools/datasets/*.py"))
    if not path.name.startswith("_") and path.name != "setup.py"  # its command line is setuptools'
)


def run(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / script), *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, timeout=120)


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=() if name == "deepy.py" else pytest.mark.slow) for name in SCRIPTS]
)
def test_help_and_version(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split("\n\n")[1]) > 30  # a description below the usage
    done = run(script, "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("neox ")
    assert run(script, "--no-such-flag").returncode == 2


def test_shells_complete_flags() -> None:
    line = "deepy.py train.py --dr"
    answer = ROOT / "deepy.py"
    command = f"exec {sys.executable} {answer} 8>&1 9>/dev/null 1>/dev/null 2>/dev/null"
    variables = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={**os.environ, **variables})
    assert done.stdout.strip() == "--dry-run"
    for script in SCRIPTS:
        text = (ROOT / script).read_text()
        if "ScriptParser(" in text and script != "train.py":
            assert "PYTHON_ARGCOMPLETE_OK" in text[:200], script


@pytest.mark.parametrize(("script", "package"), [("deepy.py", "pydantic"), ("tools/inspect_checkpoint.py", "torch")])
def test_ctrl_c_while_packages_are_imported_is_silent(script: str, package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / script), "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "")


def test_a_flag_of_several_values_can_be_given_again() -> None:
    parser = ScriptParser()
    parser.add_argument("files", nargs="+")
    group = parser.add_argument_group("more")
    group.add_argument("--config", nargs="+", default=["base"])
    group.add_argument("--name")
    group.add_argument("--tasks", nargs="+", default=argparse.SUPPRESS)
    found = parser.parse_args(["f", "--config", "a", "b", "--config", "c", "--name", "x", "--name", "y"])
    assert (found.files, found.config, found.name) == (["f"], ["a", "b", "c"], "y")
    assert parser.parse_args(["f"]).config == ["base"]
    assert parser.parse_args(["f", "--tasks", "a", "--tasks", "b"]).tasks == ["a", "b"]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error, needs_package(DataError, "--flag", "of-yore", "r.txt"):
        import of_yore  # noqa: F401
    for words in ("--flag", "of-yore", f"{sys.executable} -m pip install -r requirements/r.txt"):
        assert words in str(error.value)
    with pytest.raises(DataError) as error, os_errors(DataError, "the file"):
        (tmp_path / "none").read_text()
    assert str(error.value) == f"the file: {os.strerror(errno.ENOENT)}"


def test_what_ends_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    class Panic(BaseException):
        """Like the exception that a Rust extension raises when Python's own one interrupts it."""

    def interrupted() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise Panic from None
        return 0

    def refused() -> int:
        open("/dev/null/file")  # noqa: SIM115
        return 0

    def wrong() -> int:
        raise DataError("the reason")

    for main, status, words in (
        (interrupted, 130, "interrupted"),
        (refused, 1, "error: /dev/null/file: Not a directory"),
        (wrong, 1, "error: the reason"),
        (lambda: None, 0, ""),
    ):
        former = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(SystemExit) as end:
                run_script(main)
        finally:
            signal.signal(signal.SIGINT, former)
        assert (end.value.code, capsys.readouterr().err.strip()) == (status, words)
    with pytest.raises(Panic):
        run_script(lambda: (_ for _ in ()).throw(Panic()))
    signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("flag", ["--input_dir", "--input-dir", "--mixed-input_dir", "--mixed_input_dir"])
def test_words_of_a_flag_are_joined_by_either_sign(flag):
    parser = ScriptParser()
    parser.add_argument("--input_dir")
    parser.add_argument("--mixed-input-dir")
    for words in ([flag, "a_b-c"], [f"{flag}=a_b-c"]):
        assert "a_b-c" in vars(parser.parse_args([*words])).values()
    assert parser.parse_known_args(["--other_flag", "--other-flag=x_y"])[1] == ["--other_flag", "--other-flag=x_y"]
