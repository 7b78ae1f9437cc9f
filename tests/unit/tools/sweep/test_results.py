"""Results of sweeps."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from neox.metrics import read_metrics
from tools.sweep import results as sweep_results
from tools.sweep.results import (
    RunResult,
    _following,
    _read_result,
    format_table,
    read_results,
    values_at_an_end,
    write_results,
)
from tools.sweep.run_files import State


def test_best_values_at_an_end_are_named() -> None:
    def result(lr: float, layers: int, state: State = State.DONE, score: float | None = 1.0) -> RunResult:
        values = {"lr": lr, "num_layers": layers, "seed": layers, "use_bias": lr > 1, "norm": "rmsnorm"}
        return RunResult(f"{lr}", values, state, score=score)

    two = [result(0.003, 4), result(0.001, 4), result(0.0003, 8)]
    (largest,) = values_at_an_end(two)
    assert "lr 0.003 is the largest of 3" in largest, "of two numbers of layers one is always the best"
    results = [*two, result(0.0001, 12)]
    largest, smallest = values_at_an_end(results)
    assert "lr 0.003 is the largest of 4" in largest
    assert "num_layers 4 is the smallest of 3" in smallest
    assert values_at_an_end([*results, result(0.01, 2, State.DIVERGED, None)]) == [], "it was tried, too"
    assert values_at_an_end([*results, result(0.0001, 4, State.FAILED, 3.0)]) == [largest, smallest]
    assert values_at_an_end([*results, result(0.002, 4, State.WAITING, None)]) == [], "it is still to be compared"
    assert values_at_an_end([*results, result(0.002, 4, State.BEGUN, 5.0)]) == []
    assert values_at_an_end(results[:1]) == []


@pytest.mark.parametrize(
    ("tried", "edge", "following"),
    [
        ([1e-3, 2e-3, 4e-3], 4e-3, 8e-3),
        ([1e-3, 2e-3, 4e-3], 1e-3, 5e-4),
        ([0.1, 0.01], 0.01, 0.001),
        ([4, 6, 8], 8, 10),
        ([1, 2], 1, None),  # layers
        ([0.0, 0.1], 0.0, None),  # weight decay
        ([0.0, 0.1], 0.1, 0.2),
        ([1.0, 1.1, 1.2], 1.2, 1.3),
    ],
)
def test_a_value_beyond_the_best_at_an_end_is_proposed(
    tried: list[float], edge: float, following: float | None
) -> None:
    assert _following(tried, edge) == following


def test_runs_that_failed_or_diverged_come_last_whatever_their_loss(tmp_path: Path, monkeypatch) -> None:
    losses = {"best": 2.0, "second": 2.5, "open": 1.9, "waiting": None, "failed": 0.5, "diverged": 0.1}
    states = {"best": State.DONE, "second": State.DONE, "open": State.BEGUN, "waiting": State.WAITING}
    states |= {"failed": State.FAILED, "diverged": State.DIVERGED}
    runs = []
    for name in reversed(losses):
        metrics = tmp_path / f"{name}.jsonl"
        if losses[name] is not None:
            row = {"iteration": 1, "kind": "step", "train/lm_loss": losses[name], "train/batch_size": 1.0}
            metrics.write_text(json.dumps({**row, "train/seq_length": 8.0, "runtime/iteration_time": 1.0}) + "\n")
        values = SimpleNamespace(values={"lr": len(runs) + 0.5})
        runs.append(SimpleNamespace(name=name, run=values, metrics=metrics, state=partial(states.get, name)))
    sweep = SimpleNamespace(metric=None, varied=("lr",), goal="min", directory=tmp_path, has_table=True)
    reads: Counter[str] = Counter()

    def counted(path: Path) -> Iterator[dict[str, Any]]:
        reads[path.stem] += 1
        return read_metrics(path)

    monkeypatch.setattr(sweep_results, "read_metrics", counted)
    found = read_results(cast(Any, sweep), cast(Any, runs), {}, {})
    names = [result.name for result in found]
    assert names[:4] == ["best", "second", "open", "waiting"]
    assert {*names[4:]} == {"failed", "diverged"}
    assert {*reads.values()} == {1}
    sweep.goal = "max"
    assert [result.name for result in read_results(cast(Any, sweep), cast(Any, runs), {}, {})][:2] == ["second", "best"]

    drawn: list[str] = []
    monkeypatch.setattr(sweep_results, "draw_curve", lambda axes, x, y, style, smooths: drawn.append(style["label"]))
    write_results(cast(Any, sweep), cast(Any, runs), found)
    assert {*drawn} == {"best", "second", "open", "failed (failed)", "diverged (diverged)"}
    assert {*reads.values()} == {3}  # a second time for the results by `max`, and once for the picture


@pytest.mark.parametrize("metric", [None, "validation/lm_loss"])
@pytest.mark.parametrize(("last", "score"), [(2.6, 2.6), ("nan", None)])
def test_a_run_whose_last_value_is_not_finite_has_no_score(
    tmp_path: Path, metric: str | None, last: float | str, score: float | None
) -> None:
    rows = [
        {"iteration": 1, "kind": "step", "train/lm_loss": 3.0, "train/batch_size": 1.0, "train/seq_length": 8.0},
        {"iteration": 1, "kind": "validation", "validation/lm_loss": 2.5},
        {"iteration": 2, "kind": "step", "train/lm_loss": 2.9, "train/batch_size": 1.0, "train/seq_length": 8.0},
        {"iteration": 2, "kind": "validation", "validation/lm_loss": last},
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = SimpleNamespace(values={})
    run = SimpleNamespace(name="a", run=values, metrics=metrics, state=lambda: State.DONE, parameters=1)
    sweep = SimpleNamespace(metric=metric, varied=())
    assert _read_result(cast(Any, sweep), cast(Any, run), run.state(), "", "").score == score


@pytest.mark.parametrize("metric", [None, "validation/lm_loss"])
def test_a_run_that_is_not_done_has_no_score_and_names_the_step_of_its_value(
    tmp_path: Path, metric: str | None
) -> None:
    step = {"kind": "step", "train/lm_loss": 3.0, "train/batch_size": 1.0, "train/seq_length": 8.0}
    rows = [{"iteration": 30, **step}, {"iteration": 30, "kind": "validation", "validation/lm_loss": 2.5}]
    rows.append({"iteration": 60, **step})
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = SimpleNamespace(values={})
    run = SimpleNamespace(name="a", run=values, metrics=metrics, state=lambda: State.BEGUN)
    sweep = SimpleNamespace(metric=metric, varied=(), directory=tmp_path, has_table=True)
    result = _read_result(cast(Any, sweep), cast(Any, run), run.state(), "", "")
    assert (result.score, result.validation_loss, result.validation_step) == (None, 2.5, 30)
    assert ("2.5000 (step 30)" in format_table(cast(Any, sweep), [result])) is (metric is None)
    write_results(cast(Any, sweep), [], [result])
    (row,) = csv.DictReader((tmp_path / "table.csv").open())
    assert (row["step"], row["validation_step"]) == ("60", "30")
