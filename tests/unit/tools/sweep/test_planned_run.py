"""What a run of a sweep has come to, by the events in its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from neox.launch import Cause
from neox.run_events import append_event
from tools.sweep.planned_run import PlannedRun, State
from tools.sweep.sweep_file import SweepRun


def run_in(directory: Path) -> PlannedRun:
    unused = cast(Any, None)
    return PlannedRun(SweepRun("a", {}), directory, unused, (), steps=4, plan=unused, totals=unused)


def test_only_a_last_word_of_the_newest_run_is_a_divergence(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    append_event(tmp_path, "start", restart=0, step=None, hosts=[])
    append_event(tmp_path, "end", reported=Cause.NOT_FINITE, decision="restart", kind="rank", step=2)
    append_event(tmp_path, "start", restart=1, step=None, hosts=[])
    assert run.state() is not State.DIVERGED  # killed after it was started again

    append_event(tmp_path, "end", reported=Cause.NOT_FINITE, decision="stop", kind="rank", step=2)
    assert run.state() is State.DIVERGED

    append_event(tmp_path, "start", restart=0, step=None, hosts=[])  # by `--redo`
    assert run.last_end() is None
    assert run.state() is not State.DIVERGED
