"""Losses of masked data: what a step's labels are divided by must not depend on how its batch is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

STEPS = 3
BATCH = 8


def mask_of_step(step: int) -> torch.Tensor:
    """Return a random mask [BATCH, 16], in which samples have different numbers of labels and one has none."""
    generator = torch.Generator().manual_seed(50 + step)
    share = torch.rand(BATCH, 1, generator=generator)
    mask = (torch.rand(BATCH, 16, generator=generator) < share).float()
    mask[step % BATCH] = 0
    return mask


def masked_batches(plan: RunPlan, dp_rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this data rank's micro batches with the part of the step's mask that belongs to its samples."""
    size = plan.batch.train_micro_batch_size_per_gpu
    accumulation = plan.batch.gradient_accumulation_steps
    for number, batch in enumerate(batches(plan, dp_rank)):
        step, part = divmod(number, accumulation)
        first = (part * plan.grid.dp_size + dp_rank) * size
        yield {**batch, "loss_mask": mask_of_step(step)[first : first + size]}


def make_plan(world: int, kind: str, **keys: Any) -> RunPlan:
    return tiny_plan(world, train_batch_size=BATCH, loss_normalization=kind, num_layers=2, **keys)


def curves(plans):
    """On this rank: losses, norms and an evaluation of each plan on masked data."""
    from neox.engine import initialize_distributed, initialize_engine

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = masked_batches(plan, grid.dp_rank)
        steps = [engine.train_batch(data) for _ in range(STEPS)]
        evaluated = engine.eval_batch(masked_batches(plan, grid.dp_rank))
        numbers = [number for step in steps for number in (step.loss, step.grad_norm)]
        answers.append([*numbers, evaluated.scores["lm_loss"], evaluated.rows[0, 1].item()])
    return answers


def plain_gradients(plans):
    """On one rank: the engine's gradients of the first step, and those of one big batch in plain torch."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.model import GPT

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        found = {}
        step = engine.optimizer.step

        def recording_step(*args, engine=engine, found=found, step=step, **kwargs):
            for name, parameter in engine.deepspeed_engine.module.named_parameters():
                found[name] = parameter.grad.clone()
            return step(*args, **kwargs)

        engine.optimizer.step = recording_step
        loss = engine.train_batch(masked_batches(plan, 0)).loss

        model = GPT(plan, grid)
        size = plan.batch.train_micro_batch_size_per_gpu
        data = masked_batches(plan, 0)
        parts = [next(data) for _ in range(BATCH // size)]
        tokens = torch.cat([part["tokens"] for part in parts])
        labels = torch.cat([part["labels"] for part in parts])
        mask = mask_of_step(0)
        logits = model(tokens).float()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        losses = losses.view(BATCH, -1) * mask
        counts = mask.sum(1)
        if plan.config.data.loss_normalization == "tokens":
            expected = losses.sum() / counts.sum()
        elif plan.config.data.loss_normalization == "samples":
            expected = (losses.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum()
        else:
            of_parts = counts.view(-1, size).sum(1)
            of_micro_batches = losses.sum(1).view(-1, size).sum(1) / of_parts.clamp(min=1)
            expected = of_micro_batches.mean()
            reported = of_micro_batches[of_parts > 0].mean()  # one without labels has no loss
        if plan.config.data.loss_normalization != "micro_batch":
            reported = expected
        expected.backward()
        wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
        answers.append((loss, reported.item(), found, wanted))
    return answers


def test_gradients_equal_those_of_one_big_batch() -> None:
    plans = [
        make_plan(1, kind, train_micro_batch_size_per_gpu=size)
        for kind in ("tokens", "samples", "micro_batch")
        for size in (1, 2, 8)
    ]
    for plan, (loss, expected, found, wanted) in zip(plans, run_ranks(1, plain_gradients, plans)[0], strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            scale = wanted[name].abs().max().item()
            assert (gradient - wanted[name]).abs().max().item() <= 1e-6 * max(scale, 1e-3), (name, plan.batch)


CUTS = [
    *({"train_micro_batch_size_per_gpu": size, "zero": zero} for size in (1, 4) for zero in (0, 1, 2, 3)),
    *({"train_micro_batch_size_per_gpu": size, "zero": zero, "pp": 2} for size in (1, 4) for zero in (0, 1)),
    *({"train_micro_batch_size_per_gpu": size, "mp": 2} for size in (2, 8)),
]
MORE_CUTS = [
    *({"train_micro_batch_size_per_gpu": size, "pp": 2, "zero": 1} for size in (1, 4)),
    *({"train_micro_batch_size_per_gpu": size, "mp": 2, "zero": 3} for size in (1, 4)),
    {"train_micro_batch_size_per_gpu": 2, "mp": 2, "pp": 2},
    {"train_micro_batch_size_per_gpu": 1, "zero": 2},
    {"train_micro_batch_size_per_gpu": 2, "mp": 2, "sequence_parallel": True},
]


def compare_with_one_rank(world: int, cuts: list[dict[str, Any]]) -> None:
    kinds = ("tokens", "samples")
    whole = run_ranks(1, curves, [make_plan(1, kind, train_micro_batch_size_per_gpu=BATCH) for kind in kinds])[0]
    plans = [make_plan(world, kind, **cut) for kind in kinds for cut in cuts]
    expected = [curve for curve in whole for _ in cuts]
    for curve, wanted, plan in zip(run_ranks(world, curves, plans)[0], expected, plans, strict=True):
        assert curve == pytest.approx(wanted, rel=4e-6), (plan.grid, plan.batch)


@pytest.mark.parametrize(
    "cuts", [[CUTS[at] for at in (0, 6, 9, 12)], pytest.param(CUTS, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_cuts_of_a_batch_train_alike_on_two_ranks(cuts: list[dict[str, Any]]) -> None:
    compare_with_one_rank(2, cuts)


@pytest.mark.slow
def test_cuts_of_a_batch_train_alike_on_four_ranks() -> None:
    compare_with_one_rank(4, MORE_CUTS)
