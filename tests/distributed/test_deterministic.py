"""`deterministic: true`: the same bits in every run, across processes and restarts."""

from __future__ import annotations

import hashlib

import pytest
import torch

from neox.errors import LaunchError, TrainingError
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan
from tests.plans import SIZES, problem_keys

KEYS = {"deterministic": True, "attention_dropout": 0.1, "hidden_dropout": 0.1, "num_layers": 2}
LAYOUTS = [{"zero": 1}, {"mp": 2}, {"pp": 2}]


def bits(plans, steps, saved_at=None):
    """For each plan: the losses from its start or checkpoint up to `steps`, with every bit, and a hash of weights."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank, start=engine.iteration * plan.batch.gradient_accumulation_steps)
        losses = []
        while engine.iteration < steps:
            if engine.iteration == saved_at and plan.config.checkpoint.save:
                save_checkpoint(engine, plan.config.checkpoint.save)
            losses.append(engine.train_batch(data).loss.hex())
        digest = hashlib.sha256()
        for parameter in engine.deepspeed_engine.module.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        answers.append((losses, digest.hexdigest(), torch.are_deterministic_algorithms_enabled()))
    return answers


def test_runs_repeat_bit_for_bit_also_after_a_restart(tmp_path):
    saves = [str(tmp_path / str(number)) for number in range(len(LAYOUTS))]
    plans = [tiny_plan(2, save=save, **layout, **KEYS) for layout, save in zip(LAYOUTS, saves, strict=True)]
    first = run_ranks(2, bits, plans, 4, 2)
    again = run_ranks(2, bits, [tiny_plan(2, **layout, **KEYS) for layout in LAYOUTS], 4)
    assert again == first
    resuming = [tiny_plan(2, load=save, **layout, **KEYS) for layout, save in zip(LAYOUTS, saves, strict=True)]
    for whole, resumed in zip(first, run_ranks(2, bits, resuming, 4), strict=True):
        for (losses, weights, enabled), (later, same_weights, _) in zip(whole, resumed, strict=True):
            assert enabled
            assert later == losses[2:]
            assert same_weights == weights


def refused_operation():
    """Name of the error when an operation has no deterministic algorithm, and whether a later run is as usual."""
    from neox.engine import initialize_distributed
    from neox.engine.engine import readable_errors

    initialize_distributed(tiny_plan(1, **KEYS))
    try:
        with readable_errors(1):
            torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
    except TrainingError as error:
        message = str(error)
    initialize_distributed(tiny_plan(1))
    return message, torch.are_deterministic_algorithms_enabled()


def test_operations_without_a_deterministic_algorithm_are_refused_by_name():
    message, still_enabled = run_ranks(1, refused_operation)[0]
    assert "put_" in message
    assert not still_enabled


def start_with_other_workspace():
    import os

    from neox.engine import initialize_distributed

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    with pytest.raises(LaunchError):
        initialize_distributed(tiny_plan(1, **KEYS))
    initialize_distributed(tiny_plan(1))


def test_a_workspace_of_cublas_that_does_not_repeat_is_refused():
    run_ranks(1, start_with_other_workspace)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("compile_layers", {"compile_layers": True}),
        ("activation_memory_budget", {"activation_memory_budget": 0.5}),
        ("optimizer.type", {"optimizer": {"type": "Adam8bit"}}),
    ],
)
def test_what_cannot_be_made_deterministic_is_refused(key, change):
    assert problem_keys(1, **{**SIZES, "deterministic": True, **change}) == [(key, "deterministic")]
