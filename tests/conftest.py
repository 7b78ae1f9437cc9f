"""Fixtures and settings of every test process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Under nohup, or in the background of a script, SIGHUP or SIGINT is ignored, and every process that a test starts would
# inherit that; the tests send these signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def empty_working_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run all tests in an empty directory, so that none finds the data and runs of a checkout that is in use."""
    former, directory = Path.cwd(), tmp_path_factory.mktemp("working-directory")
    os.chdir(directory)
    yield directory
    os.chdir(former)
    left = sorted(path.name for path in directory.iterdir())
    assert not left, f"tests wrote into the working directory: {left}"
