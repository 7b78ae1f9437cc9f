"""Profiled steps: which operations a trace holds, and where tables are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from neox.engine import TrainState
from neox.features.profiler.run import Profiler
from tests.plans import SIZES, problem_keys, small_plan


def steps(profiler: Profiler, first: int, last: int) -> None:
    """Do the steps [first, last), each with an operation of its own."""
    operations = (torch.sin, torch.cos, torch.exp, torch.sqrt)
    profiler.on_start(TrainState(first))
    for step in range(first, last):
        operations[step](torch.ones(1000))
        profiler.on_step(TrainState(step + 1), None)  # type: ignore[arg-type]
    profiler.on_end(TrainState(last))


@pytest.mark.parametrize(
    ("start", "stop", "first", "last", "seen"),
    [(1, 3, 0, 4, {"cos", "exp"}), (0, 1, 0, 2, {"sin"}), (2, 9, 0, 3, {"exp"}), (0, 2, 1, 3, {"cos"})],
)
def test_the_trace_holds_the_steps_that_were_asked_for(
    tmp_path: Path, start: int, stop: int, first: int, last: int, seen: set[str]
) -> None:
    keys = {"profile": True, "profile_step_start": start, "profile_step_stop": stop, "log_dir": str(tmp_path)}
    steps(Profiler(small_plan(**keys), 3), first, last)
    trace = json.loads((tmp_path / "profile" / "rank_0003.json").read_text())
    names = {event["name"].removeprefix("aten::") for event in trace["traceEvents"]}
    assert names & {"sin", "cos", "exp", "sqrt"} == seen
    assert f"aten::{min(seen)}" in (tmp_path / "profile" / "rank_0003.txt").read_text()


def test_memory(tmp_path: Path) -> None:
    keys = {"memory_profiling": True, "profile_step_start": 0, "profile_step_stop": 1}
    steps(Profiler(small_plan(**keys, memory_profiling_path=str(tmp_path / "there")), 0), 0, 2)
    assert [path.name for path in (tmp_path / "there").glob("*.txt")] == ["rank_0000_memory.txt"]
    assert "aten::sin" in (tmp_path / "there" / "rank_0000_memory.txt").read_text()


def test_a_resume_past_the_steps_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps(Profiler(small_plan(profile=True, profile_step_stop=2, profile_step_start=1, log_dir=str(tmp_path)), 0), 2, 3)
    assert "nothing is profiled" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "other", "keys"),
    [
        ("profile", "log_dir", {"profile": True}),
        ("memory_profiling", "log_dir", {"memory_profiling": True}),
        ("profile_step_start", "profile_step_stop", {"profile": True, "log_dir": "a", "profile_step_start": 12}),
    ],
)
def test_what_is_refused(key: str, other: str, keys: dict[str, Any]) -> None:
    (found,) = problem_keys(**SIZES, **keys)
    assert found[:2] == (key, other)
