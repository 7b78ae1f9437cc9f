"""Offload to host memory: the curves, norms and clipping of training without it, and resuming with it on and off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.test_reshard import relay_and_still, worst
from tests.distributed.training_runs import batches, tiny_plan

STEPS = 6
CPU = {"device": "cpu"}
TOLERANCE = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 2e-3}

# Degrees, ZeRO stage and precision of two ranks; each with and without offload.
FAST: list[dict[str, Any]] = [
    {"zero": 2, "precision": "fp32"},
    {"zero": 3, "precision": "fp32"},
    {"zero": 1, "precision": "bf16", "pp": 2},
]
FURTHER: list[dict[str, Any]] = [
    {"zero": zero, "precision": precision, **degrees}
    for precision in ("fp32", "bf16", "fp16")
    for zero, degrees in ((1, {}), (1, {"mp": 2}), (2, {}), (2, {"mp": 2}), (3, {}), (3, {"mp": 2}), (1, {"pp": 2}))
] + [{"zero": 1, "precision": "bf16", "pp": 2, "no_weight_tying": True}]


def offloading(zero: int, **keys: Any) -> dict[str, Any]:
    """Return keys of a plan with all that a ZeRO stage can offload."""
    weights = {"offload_param": CPU} if zero == 3 else {}
    return {**keys, "zero": zero, "zero_optimization": {"stage": zero, "offload_optimizer": CPU, **weights}}


def curves_and_ties(plans: Sequence[RunPlan]) -> list[tuple[list[tuple[float, float]], float | None]]:
    """For each plan: (loss, gradient norm) of each step, and this rank's sum of a tied embedding of a pipeline."""
    from neox.engine import initialize_distributed, initialize_engine

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank)
        results = [engine.train_batch(data) for _ in range(STEPS)]
        tied = getattr(engine.deepspeed_engine.module, "tied_modules", {})
        sums = [layer.word_embeddings.weight.detach().double().sum().item() for layer in tied.values()]
        answers.append(([(result.loss, result.grad_norm) for result in results], sums[0] if sums else None))
    return answers


@pytest.mark.parametrize("cases", [FAST, pytest.param(FURTHER, marks=pytest.mark.slow)], ids=["fast", "further"])
def test_curves_with_and_without_offload_are_equal(cases):
    plans = [tiny_plan(2, **keys) for case in cases for keys in (case, offloading(**case))]
    ranks = run_ranks(2, curves_and_ties, plans, timeout=500)
    for number, case in enumerate(cases):
        (expected, _), (found, _) = ranks[0][2 * number : 2 * number + 2]
        limit = TOLERANCE[case["precision"]]
        for (loss, norm), (loss_1, norm_1) in zip(found, expected, strict=True):
            assert loss == pytest.approx(loss_1, rel=limit), case
            assert norm == pytest.approx(norm_1, rel=10 * limit), case
        assert max(norm for _, norm in expected) > 0.5, "clipping is not exercised"
        tied = [rank[2 * number + 1][1] for rank in ranks]
        assert tied[0] == tied[1], (case, "copies of the tied embedding drift apart")


SWITCHES = {
    "fp32": [("on", 2), ("off", 2), ("on", 3), ("off", 1), ("on", 1)],
    "bf16": [("on", 1), ("off", 1), ("on", 3), ("on", 3), ("off", 3)],
}


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_resume_with_offload_switched_on_and_off(tmp_path, precision):
    save = str(tmp_path / "relay")
    common = {"precision": precision, "gpt_j_residual": True, "no_weight_tying": True}
    relayed = [
        tiny_plan(
            2, **(offloading(zero, **common) if switch == "on" else {"zero": zero, **common}), save=save, load=save
        )
        for switch, zero in SWITCHES[precision]
    ]
    still = tiny_plan(2, zero=SWITCHES[precision][0][1], save=str(tmp_path / "still"), **common)
    got, expected = run_ranks(2, relay_and_still, relayed, still, timeout=300)[0]
    assert worst([loss for loss, _ in got], [loss for loss, _ in expected]) < TOLERANCE[precision]
