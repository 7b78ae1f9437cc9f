"""Results of sweeps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tools.sweep.planned_run import State
from tools.sweep.results import RunResult, _read_result, values_at_an_end


def test_best_values_at_an_end_are_named() -> None:
    def result(lr: float, layers: int, state: State = State.DONE, score: float | None = 1.0) -> RunResult:
        values = {"lr": lr, "num_layers": layers, "seed": layers, "use_bias": lr > 1, "norm": "rmsnorm"}
        return RunResult(f"{lr}", values, state, score=score)

    results = [result(0.003, 4), result(0.001, 4), result(0.0003, 8)]
    largest, smallest = values_at_an_end(results)
    assert "lr 0.003 is the largest of 3" in largest
    assert "num_layers 4 is the smallest of 2" in smallest
    assert values_at_an_end([*results, result(0.01, 2, State.DIVERGED, None)]) == [], "it was tried, too"
    untried = [result(0.01, 2, State.WAITING, None), result(0.0001, 4, State.FAILED, None)]
    assert values_at_an_end([*results, *untried]) == [largest, smallest]
    assert values_at_an_end(results[:1]) == []


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
    assert _read_result(cast(Any, sweep), cast(Any, run), "", "").score == score
