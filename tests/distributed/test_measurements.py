"""Timers and the gradient noise scale: alike in every layout, without a trace in the losses."""

import math

import pytest

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

MEASURED = {
    "wall_clock_breakdown": True,
    "log_gradient_noise_scale": True,
    "gradient_noise_scale_n_batches": 2,
}


def noise_scale(result):
    return result.numbers.get("train/noise_scale")


def steps_of(plans):
    """Five steps and an evaluation of each plan on this rank."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.features.table import build_features

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device, build_features)
        data = batches(plan, grid.dp_rank)
        results = [engine.train_batch(data) for _ in range(4)]
        engine.eval_batch(batches(plan, grid.dp_rank))
        answers.append([*results, engine.train_batch(data)])
    return answers


def test_measurements_of_every_layout():
    plain, *one = run_ranks(1, steps_of, [tiny_plan(1), tiny_plan(1, **MEASURED)])[0]
    assert all(result.timers == {} and noise_scale(result) is None for result in plain)
    layouts = [tiny_plan(2, **MEASURED), tiny_plan(2, mp=2, **MEASURED), tiny_plan(2, pp=2, **MEASURED)]
    both = run_ranks(2, steps_of, layouts)
    for run in (*one, *both[0], *both[1]):
        assert [result.loss for result in run] == pytest.approx([result.loss for result in plain], rel=1e-5)
        assert [noise_scale(result) for result in run[:1]] == [None]
        assert noise_scale(run[1]) == noise_scale(run[2]) != noise_scale(run[3]) == noise_scale(run[4])
        assert noise_scale(run[4]) == pytest.approx(noise_scale(one[0][4]), rel=1e-3)
        for result in run:
            assert set(result.timers) == {"forward", "backward", "communication", "optimizer"}
            assert all(math.isfinite(seconds) and seconds >= 0 for seconds in result.timers.values())
            assert min(result.timers[part] for part in ("forward", "backward", "optimizer")) > 0
    assert all(result.timers["communication"] > 0 for run in (both[0][0], both[1][2]) for result in run)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_noise_scale_in_half_precision_is_that_of_fp32(precision):
    half = {precision: {"enabled": True} | ({"initial_scale_power": 8} if precision == "fp16" else {})}
    plans = [tiny_plan(1, **MEASURED), tiny_plan(1, **MEASURED, **half, gradient_noise_scale_cpu_offload=True)]
    exact, rounded = run_ranks(1, steps_of, plans)[0]
    assert noise_scale(rounded[4]) == pytest.approx(noise_scale(exact[4]), rel=0.1)
