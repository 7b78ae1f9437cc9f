"""Learning rates against gpt-neox's recorded runs and against the formulas' fixed points."""

import json
import math
from pathlib import Path

import pytest

from neox.optim import Schedule

GOLDEN = Path(__file__).parents[2] / "golden" / "loss_curves.json"


def schedule(style="cosine", version="later", warm=3.0, end=30, start=1e-3, minimum=1e-4):
    return Schedule(style, start, minimum, warm, end, version)


def test_v2_cosine_reproduces_recorded_learning_rates():
    recorded = json.loads(GOLDEN.read_text())["v2_pp1_mp1_dp1_fp32"]["iters"]
    ours = schedule(version="v2.0", warm=0.1 * 30)
    for iteration, row in recorded.items():
        assert ours.lr(int(iteration)) == pytest.approx(row["lr_next"], rel=1e-3, abs=5.1e-8)


def test_v2_starts_at_zero_and_later_does_not():
    assert schedule(version="v2.0").lr(0) == 0.0
    assert schedule().lr(0) == pytest.approx(1e-3 / 3)
    assert schedule().lr(1) == pytest.approx(1e-3 / 3)


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential", "constant"])
@pytest.mark.parametrize("version", ["v2.0", "later"])
def test_peak_after_warmup_and_never_below_the_floor(style, version):
    ours = schedule(style, version)
    assert ours.lr(3) == pytest.approx(1e-3)
    assert all(ours.lr(i) >= 1e-4 - 1e-18 for i in range(3, 100))
    assert max(ours.lr(i) for i in range(100)) == pytest.approx(1e-3)


def test_later_reaches_the_floor_at_the_end_and_holds_it():
    for style in ("linear", "cosine"):
        assert schedule(style).lr(30) == pytest.approx(1e-4)
        assert schedule(style).lr(45) == pytest.approx(1e-4)


def test_v2_is_constant_for_the_last_warmup_length():
    ours = schedule("linear", "v2.0", minimum=0.0)
    assert ours.lr(27) == ours.lr(30) == ours.lr(99) == pytest.approx(1e-3 * (30 - 24) / 30)


def test_exponential_halves():
    assert schedule("exponential", warm=0.0).lr(30) == pytest.approx(1e-3 * math.exp(-0.693))


def test_a_warmup_shorter_than_a_step_does_not_overshoot():
    assert schedule(warm=0.12).lr(0) == pytest.approx(1e-3)


def test_no_warmup_starts_at_the_peak():
    assert schedule(warm=0.0).lr(0) == pytest.approx(1e-3)
    assert schedule("constant", warm=0.0).lr(1000) == pytest.approx(1e-3)
