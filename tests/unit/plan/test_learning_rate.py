"""Learning rates against gpt-neox's recorded runs, DeepSpeed's classes, and the formulas' fixed points."""

import json
import math
from pathlib import Path
from typing import get_args

import deepspeed.runtime.lr_schedules as theirs
import pytest
import torch

from neox.config import NeoXConfig
from neox.config.sections.schedule import ScheduleConfig
from neox.errors import ConfigError
from neox.optim import LRSchedule
from neox.plan import static_problems
from neox.plan.rules import notes_without_effect
from neox.plan.schedule import Annealing, WarmupStableDecay, schedule_of
from tests.plans import SIZES, plan_of, problem_keys

GOLDEN = Path(__file__).parents[2] / "golden" / "loss_curves.json"


def schedule(style="cosine", version="later", warm=3.0, end=30, peak=1e-3, lowest=1e-4):
    return Annealing(style, peak, lowest, warm, end, version)


@pytest.mark.parametrize(("run", "version"), [("v2_pp1_mp1_dp1_fp32", "v2.0"), ("head_llama_gqa_pp1", "later")])
def test_cosines_reproduce_recorded_learning_rates(run, version):
    recorded = json.loads(GOLDEN.read_text())[run]["iters"]
    ours = schedule(version=version, warm=0.1 * 30)
    for iteration, row in recorded.items():
        assert ours.lr(int(iteration)) == pytest.approx(row["lr_next"], rel=1e-3, abs=5.1e-8)


def test_v2_starts_at_zero_and_later_with_the_rate_of_its_second_step():
    """gpt-neox #1379. The losses of the curves in tests/distributed/test_golden_curves.py depend on this rate."""
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
    ours = schedule("linear", "v2.0", lowest=0.0)
    assert ours.lr(27) == ours.lr(30) == ours.lr(99) == pytest.approx(1e-3 * (30 - 24) / 30)


def test_exponential_halves():
    assert schedule("exponential", warm=0.0).lr(30) == pytest.approx(1e-3 * math.exp(-0.693))


def test_a_warmup_shorter_than_a_step_does_not_overshoot():
    assert schedule(warm=0.12).lr(0) == pytest.approx(1e-3)


def test_no_warmup_starts_at_the_peak():
    assert schedule(warm=0.0).lr(0) == pytest.approx(1e-3)
    assert schedule("constant", warm=0.0).lr(1000) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("shape", "half"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_wsd_holds_the_peak_and_decays_at_the_end(shape, half):
    ours = WarmupStableDecay(shape, peak=1e-3, lowest=1e-4, warmup_steps=3.0, decay_steps=10, end_step=30)
    assert ours.lr(3) == ours.lr(20) == pytest.approx(1e-3)
    assert ours.lr(25) == pytest.approx(1e-4 + half * 9e-4)
    assert ours.lr(30) == ours.lr(99) == pytest.approx(1e-4)


SCHEDULERS = {
    "LRRangeTest": {"lr_range_test_step_size": 7, "lr_range_test_step_rate": 3.0},
    "LRRangeTest stairs": {"lr_range_test_step_size": 7, "lr_range_test_staircase": True},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 10},
    "OneCycle asymmetric": {
        **{"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 7, "cycle_second_step_size": 12},
        **{"decay_step_size": 5, "decay_lr_rate": 0.5, "decay_mom_rate": 0.001},
    },
    "OneCycle stairs": {
        **{"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 9, "cycle_second_step_size": 6},
        **{"cycle_first_stair_count": 3, "cycle_second_stair_count": 2, "cycle_momentum": False},
    },
    "WarmupLR": {"warmup_num_steps": 10, "warmup_min_lr": 1e-5},
    "WarmupLR linear": {"warmup_num_steps": 10, "warmup_max_lr": 2e-3, "warmup_type": "linear"},
    "WarmupDecayLR": {"warmup_num_steps": 10, "total_num_steps": 30, "warmup_min_lr": 1e-5},
    "WarmupDecayLR linear": {"warmup_num_steps": 1, "total_num_steps": 20, "warmup_type": "linear"},
    "WarmupCosineLR": {"warmup_num_steps": 10, "total_num_steps": 30, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05},
}


@pytest.mark.parametrize("case", SCHEDULERS)
def test_learning_rates_and_betas_are_those_of_deepspeed(case):
    kind, params = case.split()[0], SCHEDULERS[case]
    plan = plan_of(**SIZES, lr=4e-4, scheduler={"type": kind, "params": params})
    optimizers = [torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=4e-4, betas=(0.9, 0.95)) for _ in range(2)]
    reference = getattr(theirs, kind)(optimizers[0], **params)
    ours = LRSchedule(plan, optimizers[1])
    for step in range(50):
        (expected,), (found,) = (optimizer.param_groups for optimizer in optimizers)
        assert found["lr"] == pytest.approx(expected["lr"], rel=1e-12, abs=1e-18), step
        assert found["betas"] == pytest.approx(expected["betas"], rel=1e-12), step
        resumed = LRSchedule(plan, optimizers[1])
        resumed.load_state_dict(ours.state_dict())
        assert resumed.get_lr() == ours.get_lr()
        reference.step()
        ours.step()


GROWING_BETA = {"cycle_min_lr": 0, "cycle_max_lr": 1, "decay_mom_rate": 1, "decay_step_size": 100}


@pytest.mark.parametrize(
    ("first", "keys"),
    [
        ("scheduler.params.cycle_min_lr", {"scheduler": {"type": "WarmupLR", "params": {"cycle_min_lr": 1.0}}}),
        ("scheduler.type", {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1.0}}}),
        (
            "scheduler.params.cycle_min_lr",
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1.0, "cycle_max_lr": 0.1}}},
        ),
        (
            "scheduler.params.decay_mom_rate",
            {"train_iters": 5000, "scheduler": {"type": "OneCycle", "params": GROWING_BETA}},
        ),
        (
            "scheduler.params.warmup_num_steps",
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 11}}},
        ),
        ("lr_decay_style", {"lr_decay_style": "WSD"}),
        ("lr_wsd_decay_iters", {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9, "warmup": 0.2}),
    ],
)
def test_impossible_schedules_are_refused_by_name(first, keys):
    (found,) = problem_keys(**{**SIZES, **keys})
    assert found[0] == first


def test_keys_that_a_scheduler_replaces_are_named():
    scheduler = {"type": "WarmupLR"}
    config = NeoXConfig.from_flat({**SIZES, "scheduler": scheduler, "lr_decay_style": "cosine", "warmup": 0.1})
    assert not static_problems(config)
    (note,) = notes_without_effect(config)
    assert note.keys == ("lr_decay_style", "warmup", "scheduler")


def test_every_schedule_is_described():
    for case, params in SCHEDULERS.items():
        kind = case.split()[0]
        config = NeoXConfig.from_flat({**SIZES, "scheduler": {"type": kind, "params": params}})
        assert kind in schedule_of(config).describe()


def test_schedules_that_nothing_computes_are_errors():
    with pytest.raises(KeyError):
        schedule("staircase").lr(10)
    config = NeoXConfig.from_flat({**SIZES, "scheduler": {"type": "WarmupLR"}})
    unknown = config.schedule.scheduler.model_copy(update={"type": "Staircase"})
    unchecked = config.model_copy(update={"schedule": config.schedule.model_copy(update={"scheduler": unknown})})
    with pytest.raises(KeyError):
        schedule_of(unchecked)


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_decay_without_a_known_end_is_an_error(kind):
    keys = {key: value for key, value in SIZES.items() if key != "train_iters"}
    config = NeoXConfig.from_flat({**keys, "scheduler": {"type": kind}})
    with pytest.raises(ConfigError, match="total_num_steps"):
        schedule_of(config)


def test_every_schedule_of_the_sections_is_computed():
    for key in ("lr_decay_style", "lr_wsd_decay_style"):
        for style in get_args(ScheduleConfig.model_fields[key].annotation):
            keys = {key: style, "lr_wsd_decay_iters": 2, **({"lr_decay_style": "WSD"} if "wsd" in key else {})}
            assert schedule_of(NeoXConfig.from_flat({**SIZES, **keys})).lr(10) >= 0


@pytest.mark.parametrize(("version", "most", "limit"), [("v2.0", 5, "at most 5"), ("later", 9, "below 10")])
def test_the_limit_of_warmup_steps_is_told(version, most, limit):
    keys = {**SIZES, "train_iters": 10, "lr_schedule_version": version}
    assert not static_problems(NeoXConfig.from_flat({**keys, "lr_warmup_iters": most}))
    (problem,) = static_problems(NeoXConfig.from_flat({**keys, "lr_warmup_iters": most + 1}))
    assert limit in problem.message
