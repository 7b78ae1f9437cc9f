"""Results of sweeps."""

from __future__ import annotations

from tools.sweep.planned_run import State
from tools.sweep.results import RunResult, values_at_an_end


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
