"""Optimizers in DeepSpeed's engines: equal steps under every ZeRO stage, and states that load at any degrees."""

from __future__ import annotations

import pytest

from neox.config.sections.optimizer_table import OPTIMIZERS, goes_on
from neox.errors import CheckpointError
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, begun_start, tiny_plan, train_curves

NUMBERS = {
    "sgd": {"lr": 0.5, "momentum": 0.9},
    "sm3": {"lr": 0.01, "momentum": 0.9},
    "adafactor": {"lr": 0.03},
    "adam8bit": {"min_8bit_size": 0},
    "lion8bit": {"min_8bit_size": 0},
}
SMALL = {"num_layers": 2, "warmup": 0.0}
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


def plan_with(world, name, **keys):
    optimizer = {"type": OPTIMIZERS[name].names[0], "params": {"lr": 0.003, **NUMBERS.get(name, {})}}
    return tiny_plan(world, optimizer=optimizer, **{**SMALL, **keys})


DIVIDED = [name for name, kind in OPTIMIZERS.items() if kind.elementwise or kind.gathers]
"""Optimizers whose states ZeRO can divide over data ranks."""


def rounding_of(name, exact=2e-6):
    """Relative difference between losses of equal trainings.

    Muon multiplies in bf16, and states of 8 bits are rounded by blocks of other elements under other layouts.
    """
    return {"muon": 1e-4, "adam8bit": 1e-4, "lion8bit": 3e-4}.get(name, exact)


def test_steps_under_zero_1_equal_those_under_zero_0():
    """On one rank: ZeRO 1 gives the optimizer flat tensors already."""
    stages = (0, 1)
    plans = [plan_with(1, name, zero=zero) for name in DIVIDED for zero in stages]
    curves = run_ranks(1, train_curves, plans, 4)[0]
    for number, name in enumerate(DIVIDED):
        whole, flat = curves[2 * number], curves[2 * number + 1]
        assert [loss for loss, _ in flat] == pytest.approx([loss for loss, _ in whole], rel=rounding_of(name)), name
        assert whole[-1][0] < whole[0][0], name


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_optimizers_that_need_whole_parameters_train_in_16_bits(precision):
    """Without ZeRO they get fp32 copies of whole parameters; the curves are close to those of fp32."""
    names = [name for name, kind in OPTIMIZERS.items() if not kind.elementwise]
    plans = [plan_with(2, name, **PRECISIONS[key]) for name in names for key in ("fp32", precision)]
    curves = run_ranks(2, train_curves, plans, 4, timeout=300)[0]
    for number, name in enumerate(names):
        exact, rounded = curves[2 * number], curves[2 * number + 1]
        assert [loss for loss, _ in rounded] == pytest.approx([loss for loss, _ in exact], rel=5e-3), name
        assert exact[-1][0] < exact[0][0], name


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_of_two_ranks_under_every_stage(precision):
    stages = (0, 1, 2, 3)
    plans = [plan_with(2, name, zero=zero, **PRECISIONS[precision]) for name in DIVIDED for zero in stages]
    curves = run_ranks(2, train_curves, plans, 4, timeout=400)[0]
    for number, name in enumerate(DIVIDED):
        whole, *others = curves[len(stages) * number : len(stages) * (number + 1)]
        for stage, curve in enumerate(others, 1):
            wanted = pytest.approx([loss for loss, _ in whole], rel=rounding_of(name) if precision == "fp32" else 2e-3)
            assert [loss for loss, _ in curve] == wanted, (name, stage)


@pytest.mark.parametrize("zero", [1, *(pytest.param(zero, marks=pytest.mark.slow) for zero in (0, 2, 3))])
def test_states_of_8_bits_resume_exactly_and_go_on_from_fp32(zero, tmp_path):
    """On one rank: in the same layout the codes are read as they are; Adam's fp32 states are rounded to them."""
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    saving = [plan_with(1, "adam8bit", zero=zero, save=here), plan_with(1, "adam", zero=zero, save=there)]
    resuming = [plan_with(1, "adam8bit", zero=zero, load=d) for d in (here, there)]
    coded, exact, resumed, rounded = run_ranks(1, losses_with_saves, [*saving, *resuming], 4, 2, timeout=300)[0]
    assert resumed == coded[2:]
    assert rounded == pytest.approx(exact[2:], rel=rounding_of("adam8bit"))


def losses_with_saves(plans, steps, saved_at):
    """For each plan: losses up to `steps` from its start, or from the checkpoint that it loads; saves on the way."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device)
        start = engine.iteration
        data = batches(plan, grid.dp_rank, start=start * plan.batch.gradient_accumulation_steps)
        losses = []
        for step in range(start, steps):
            if step == saved_at and plan.config.checkpoint.save:
                save_checkpoint(engine, plan.config.checkpoint.save)
            losses.append(engine.train_batch(data).loss)
        answers.append(losses)
    return answers


FAST = ("lion", "sm3")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS]
)
def test_states_load_at_other_degrees(name, tmp_path):
    """Saved by two ranks in several layouts, resumed by one without ZeRO."""
    from neox.plan.run_start import StartMode

    layouts = [{"pp": 2}, *([{"zero": 1}, {"zero": 3}] if name in DIVIDED else [])]
    layouts += [{"mp": 2}] if OPTIMIZERS[name].elementwise else []
    directories = [str(tmp_path / str(number)) for number in range(len(layouts))]
    saving = [plan_with(2, name, save=d, **layout) for d, layout in zip(directories, layouts, strict=True)]
    whole = run_ranks(2, losses_with_saves, saving, 4, 2, timeout=300)[0]
    resuming = [plan_with(1, name, load=d) for d in directories]
    resumed = run_ranks(1, losses_with_saves, resuming, 4, 2, timeout=300)[0]
    for losses, further, layout in zip(whole, resumed, layouts, strict=True):
        assert further == pytest.approx(losses[2:], rel=rounding_of(name)), layout
    other = next(key for key in OPTIMIZERS if not goes_on(name, key))
    with pytest.raises(CheckpointError) as refused:
        begun_start(plan_with(1, other, load=directories[0]))
    for word in (OPTIMIZERS[name].names[0], OPTIMIZERS[other].names[0], "no_load_optim", "finetune"):
        assert word in str(refused.value)
    without = begun_start(plan_with(1, other, load=directories[0], no_load_optim=True))
    assert without.mode is StartMode.WEIGHTS
