"""Widths of the MLP by the rules of both gpt-neox, and what the plan says about them."""

from __future__ import annotations

import pytest

from neox.plan.report.text import format_plan
from tests.plans import small_plan

GATED = {"activation": "swiglu"}


@pytest.mark.parametrize(
    ("hidden", "keys", "width"),
    [
        (64, {}, 256),
        (64, {"intermediate_size": 100}, 100),
        (64, {"expansion_factor": 3.5}, 224),
        (64, {"intermediate_size": 100, "mlp_multiple_of": 16}, 112),
        (4096, {**GATED, "intermediate_size": 32768, "mlp_multiple_of": 256}, 11008),
        (64, {**GATED, "intermediate_size": 400, "mlp_multiple_of": 16}, 144),
        (64, GATED, 85),
        (64, {"activation": "geglu"}, 170),
        (64, {"activation": "geglu", "mlp_multiple_of": 1}, 85),
        (64, {**GATED, "mlp_width": 90}, 90),
    ],
)
def test_width(hidden, keys, width):
    plan = small_plan(hidden_size=hidden, **keys)
    assert plan.architecture.mlp_width == width
    halves = 2 if "activation" in keys else 1
    shapes = {p.name: p.shape for p in plan.layers[2].parameters}
    assert shapes["mlp.dense_h_to_4h.weight"] == (halves * width, hidden)
    assert shapes["mlp.dense_4h_to_h.weight"] == (hidden, width)


def test_the_plan_says_what_width_results():
    plan = small_plan(**GATED, intermediate_size=400, mlp_multiple_of=16, num_kv_heads=2)
    assert "MLP width 144" in format_plan(plan)
