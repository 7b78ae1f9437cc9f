"""Which losses count as spikes."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest

from neox.checkpoint import LAST_LOSSES, SKIPPED
from neox.features.loss_spikes.run import LossBand, build
from tests.plans import small_plan


def filled(factor: float = 8.0, window: int = 20, center: float = 4.0) -> LossBand:
    """A band of losses around a center, with a standard deviation of 0.1."""
    generator = random.Random(0)
    band = LossBand(factor, window)
    for step in range(window):
        assert band.judge(generator.gauss(center, 0.1), step) is None
    return band


def test_a_loss_far_above_the_last_ones_is_a_spike() -> None:
    spike = filled().judge(6.0, 21)
    assert spike is not None
    assert (spike.step, spike.loss) == (21, 6.0)
    assert spike.median == pytest.approx(4.0, abs=0.1)
    assert 4.4 < spike.limit < 5.6  # 8 deviations of about 0.1
    assert filled().judge(4.3, 21) is None
    assert filled().judge(2.0, 21) is None  # a loss that falls is none
    assert filled().judge(math.inf, 21) is not None
    assert filled().judge(math.nan, 21) is None  # other rules are for those


def test_no_loss_is_judged_before_the_window_is_full() -> None:
    band = LossBand(2.0, 5)
    assert [band.judge(loss, step) for step, loss in enumerate([1.0, 9.0, 1.0, 50.0, 1.0])] == [None] * 5
    assert band.judge(50.0, 6) is not None


def test_one_outlier_does_not_widen_the_band() -> None:
    band = filled()
    assert band.judge(100.0, 21) is not None
    assert band.judge(6.0, 22) is not None


def test_a_loss_that_stays_high_is_soon_no_spike() -> None:
    band = filled()
    verdicts = [band.judge(6.0, step) is not None for step in range(20)]
    assert verdicts[0]
    assert not verdicts[-1]


def test_equal_losses_leave_a_thousandth() -> None:
    band = LossBand(8.0, 10)
    for step in range(10):
        band.judge(2.0, step)
    assert band.judge(2.01, 11) is None
    assert band.judge(2.02, 12) is not None


def test_a_band_goes_on_with_the_losses_of_an_earlier_one() -> None:
    losses = filled().losses
    assert len(losses) == 20
    assert LossBand(8.0, 20, losses).judge(6.0, 21) == filled().judge(6.0, 21)
    assert LossBand(8.0, 5, losses).losses == losses[-5:]
    assert LossBand(8.0, 30, losses).judge(6.0, 21) is None  # until the window is full


def test_a_run_that_looks_for_no_spikes_keeps_what_it_has_skipped() -> None:
    """`loss_spike_max_rollbacks` counts over all restarts, also those in between with another action."""
    start = SimpleNamespace(saved={SKIPPED: [[5, 8]], LAST_LOSSES: [1.0] * 9}, own_directory=True)
    model = SimpleNamespace(plan=small_plan(loss_spike_action="off"))
    spikes = build(model, start)
    assert spikes is not None
    spikes.load(None, start)
    report = SimpleNamespace(result=SimpleNamespace(loss=1e9))
    assert not spikes.wants_rollback(SimpleNamespace(iteration=20), report)
    assert spikes.state(None) == {SKIPPED: [[5, 8]]}
    assert build(model, SimpleNamespace(saved={})) is None
