"""Optimizers in DeepSpeed's engines: equal steps under every ZeRO stage, and states that load at any degrees."""

from __future__ import annotations

import pytest

from neox.config.sections.optimizer_table import OPTIMIZERS
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan, train_curves

NUMBERS = {"sgd": {"lr": 0.5, "momentum": 0.9}}
SMALL = {"num_layers": 2, "warmup": 0.0}


def plan_with(world, name, **keys):
    optimizer = {"type": OPTIMIZERS[name].names[0], "params": {"lr": 0.003, **NUMBERS.get(name, {})}}
    return tiny_plan(world, optimizer=optimizer, **{**SMALL, **keys})


ELEMENTWISE = [name for name, kind in OPTIMIZERS.items() if kind.elementwise]


def test_steps_under_zero_1_equal_those_under_zero_0():
    """On one rank: ZeRO 1 gives the optimizer flat tensors already."""
    stages = (0, 1)
    plans = [plan_with(1, name, zero=zero) for name in ELEMENTWISE for zero in stages]
    curves = run_ranks(1, train_curves, plans, 4)[0]
    for number, name in enumerate(ELEMENTWISE):
        whole, flat = curves[2 * number], curves[2 * number + 1]
        assert [loss for loss, _ in flat] == pytest.approx([loss for loss, _ in whole], rel=2e-6), name
        assert whole[-1][0] < whole[0][0], name


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_of_two_ranks_under_every_stage(precision):
    stages = (0, 1, 2, 3)
    plans = [plan_with(2, name, zero=zero, precision=precision) for name in ELEMENTWISE for zero in stages]
    curves = run_ranks(2, train_curves, plans, 4, timeout=400)[0]
    for number, name in enumerate(ELEMENTWISE):
        whole, *others = curves[len(stages) * number : len(stages) * (number + 1)]
        for stage, curve in enumerate(others, 1):
            wanted = pytest.approx([loss for loss, _ in whole], rel=2e-6 if precision == "fp32" else 2e-3)
            assert [loss for loss, _ in curve] == wanted, (name, stage)


def saved_and_resumed(pairs, steps, saved_at):
    """For each (saving plan, resuming plan): losses of an undisturbed run, and of one that resumes its checkpoint.

    The resuming plan is None on ranks of the first world only.
    """
    from neox.engine import initialize_distributed, open_engine, save_checkpoint

    answers = []
    for saving in pairs:
        grid, device = initialize_distributed(saving)
        engine = open_engine(saving, grid, device)
        start = engine.iteration
        data = batches(saving, grid.dp_rank, start=start * saving.batch.gradient_accumulation_steps)
        losses = []
        for step in range(start, steps):
            if step == saved_at and saving.config.checkpoint.save:
                save_checkpoint(engine, saving.config.checkpoint.save)
            losses.append(engine.train_batch(data).loss)
        answers.append(losses)
    return answers


FROM = [{"zero": 1}, {"mp": 2, "zero": 0}, {"zero": 3}]


@pytest.mark.parametrize(
    "name", [name if name == "lion" else pytest.param(name, marks=pytest.mark.slow) for name in ELEMENTWISE]
)
def test_states_load_at_other_degrees(name, tmp_path):
    """Saved by two ranks in three layouts, resumed by one without ZeRO."""
    directories = [str(tmp_path / str(number)) for number in range(len(FROM))]
    saving = [plan_with(2, name, save=directory, **layout) for directory, layout in zip(directories, FROM, strict=True)]
    whole = run_ranks(2, saved_and_resumed, saving, 4, 2, timeout=300)[0]
    resumed = run_ranks(1, saved_and_resumed, [plan_with(1, name, load=d) for d in directories], 4, 2, timeout=300)[0]
    for losses, further in zip(whole, resumed, strict=True):
        assert further == pytest.approx(losses[2:], rel=2e-6)
