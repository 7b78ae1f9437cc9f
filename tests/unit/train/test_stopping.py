"""Signals that end training early: remembered, and answered so that the launcher leaves time to save."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from neox.launch import acknowledge_stop, report_progress
from neox.launch.agent.agent_files import RankActivity
from neox.train.stopping import StopSignals


def test_the_training_loops_signal_handler_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = RankActivity(tmp_path / "progress", tmp_path)
    monkeypatch.setenv("NEOX_PROGRESS_FILE", str(progress.file))
    monkeypatch.setenv("RANK", "3")
    report_progress()
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM
    assert progress.has_answered(3)
    assert not progress.has_answered(2)
    monkeypatch.setenv("NEOX_PROGRESS_FILE", str(tmp_path / "gone" / "progress"))
    acknowledge_stop()  # the agent's directory is gone: no error in a signal handler


def test_a_signal_that_comes_after_another_ranks_has_ended_the_training_does_not_kill() -> None:
    former = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals() as signals:
            signals.elsewhere = True
        signal.raise_signal(signal.SIGTERM)
        assert signals.exit_code == 0
    finally:
        signal.signal(signal.SIGTERM, former)
        signal.signal(signal.SIGINT, signal.default_int_handler)
