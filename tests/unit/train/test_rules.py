"""The non-finite rule, stopping by signals, and the formula for floating-point operations."""

import math
import os
import signal
from types import SimpleNamespace

import pytest

from neox.data.run_data import DataIterators
from neox.engine import StepResult
from neox.errors import TrainingError
from neox.train import Trainer
from neox.train.stopping import NonFiniteRule, StopSignals, ignore_signals
from tests.errors import raises_naming
from tests.plans import small_plan

GOOD = StepResult({"lm_loss": 2.0}, grad_norm=1.0, loss_scale=1.0, lr=1e-3, update_skipped=False)


def bad(loss=math.nan, norm=math.inf, scale=1.0, skipped=True):
    return StepResult({"lm_loss": loss}, grad_norm=norm, loss_scale=scale, lr=1e-3, update_skipped=skipped)


def check(rule, result, iteration):
    """What the loop does after each step."""
    counted = rule.counts(result)
    rule.enforce(result, iteration)
    return counted


def test_the_first_bad_step_ends_the_run_by_default():
    with pytest.raises(TrainingError) as ended:
        check(NonFiniteRule(0, dynamic_loss_scale=False), bad(), 7)
    assert "iteration 7" in str(ended.value)
    assert "max_nonfinite_steps" in str(ended.value)


def test_bad_steps_are_counted_in_a_row():
    rule = NonFiniteRule(2, dynamic_loss_scale=False)
    assert [check(rule, step, 1) for step in (bad(), bad(), GOOD, bad(), bad())] == [True, True, False, True, True]
    with pytest.raises(TrainingError):
        check(rule, bad(), 6)
    assert rule.in_a_row == 3


def test_a_bad_step_that_was_applied_ends_the_run_at_once():
    with pytest.raises(TrainingError) as ended:
        check(NonFiniteRule(5, dynamic_loss_scale=False), bad(skipped=False), 1)
    assert "max_nonfinite_steps" not in str(ended.value), "a higher limit would not help"


def test_a_shrinking_loss_scale_does_not_count_but_a_bad_loss_does():
    rule = NonFiniteRule(0, dynamic_loss_scale=True)
    assert not check(rule, bad(loss=2.0, scale=65536.0), 1)
    with pytest.raises(TrainingError):
        check(rule, bad(loss=math.nan, scale=65536.0), 2)
    with pytest.raises(TrainingError):
        check(rule, bad(loss=2.0, scale=1.0), 3)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_first_signal_is_remembered_and_handlers_come_back(signum, code):
    former = signal.getsignal(signum)
    with StopSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), signum)
        assert signals.received == signum
        assert signals.exit_code == code
    assert signal.getsignal(signum) is former


def test_a_process_that_is_about_to_end_ignores_signals():
    former = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        ignore_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)


def test_a_fixed_loss_scale_does_not_shrink_and_says_so() -> None:
    """It would skip every step for ever: DeepSpeed lowers dynamic scales only."""
    rule = NonFiniteRule(1, dynamic_loss_scale=False)
    assert check(rule, bad(loss=2.0, scale=65536.0), 1)
    with raises_naming(TrainingError, "fp16.loss_scale", "65536"):
        check(rule, bad(loss=2.0, scale=65536.0), 2)


@pytest.mark.parametrize(("scale", "is_dynamic"), [(None, True), (0, True), (65536, False)])
def test_the_trainer_knows_whether_the_scale_is_fixed(scale: int | None, is_dynamic: bool) -> None:
    plan = small_plan(fp16={"enabled": True, "loss_scale": scale})
    engine = SimpleNamespace(features=(), iteration=0)
    assert Trainer(plan, engine, DataIterators(iter(()), (), ())).rule.dynamic_loss_scale is is_dynamic


def test_a_step_without_labels_is_not_one_that_is_not_finite() -> None:
    rule = NonFiniteRule(0, dynamic_loss_scale=False)
    assert not check(rule, bad(loss=None, norm=0.0, skipped=False), 1)
