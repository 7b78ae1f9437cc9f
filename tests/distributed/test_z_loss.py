"""The z-loss: equal gradients for every split of the vocabulary, equal curves in every layout."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

COEFFICIENT = 0.01
STEPS = 4
KEYS = {"lm_z_loss": COEFFICIENT, "no_weight_tying": True}


def gradients_of_split_heads():
    """Gradients of x and of this rank's part of the weight for both splits, next to those of a plain formula."""
    from neox.engine import initialize_distributed
    from neox.model import head_loss_parts
    from neox.parallel import copy_to_tensor_ranks, scatter_last_dim

    grid, _ = initialize_distributed(tiny_plan(2, mp=2))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 16, generator=generator)
    weight = torch.randn(64, 16, generator=generator)
    labels = torch.randint(0, 64, (30,), generator=generator)
    token_weights = torch.rand(30, generator=generator) / 30
    whole = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    logits = whole[0] @ whole[1].T
    log_sums = logits.logsumexp(-1)
    losses = log_sums - logits.gather(1, labels[:, None]).squeeze(1) + COEFFICIENT * log_sums.square()
    (losses * token_weights).sum().backward()
    for row in (False, True):
        here = [x.clone().requires_grad_(), weight.chunk(2, int(row))[grid.tp_rank].clone().requires_grad_()]
        given = scatter_last_dim(here[0], grid) if row else copy_to_tensor_ranks(here[0], grid)
        parts = head_loss_parts(given, here[1], labels, token_weights, grid, row=row, z_coefficient=COEFFICIENT)
        parts.trained.backward()
        torch.testing.assert_close(here[0].grad, whole[0].grad)
        torch.testing.assert_close(here[1].grad, whole[1].grad.chunk(2, int(row))[grid.tp_rank])


def test_gradients_of_split_vocabularies_are_exact():
    run_ranks(2, gradients_of_split_heads)


def scores_of(plans, steps):
    """Scores of each step by plan, and those of an evaluation."""
    from neox.engine import initialize_distributed, initialize_engine

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank)
        trained = [dict(engine.train_batch(data).scores) for _ in range(steps)]
        answers.append((trained, dict(engine.eval_batch(data).scores)))
    return answers


def test_scores_are_equal_in_every_layout():
    ((expected, evaluated),) = run_ranks(1, scores_of, [tiny_plan(1, **KEYS)], STEPS)[0]
    ((without, _),) = run_ranks(1, scores_of, [tiny_plan(1, no_weight_tying=True)], STEPS)[0]
    assert list(expected[0]) == list(evaluated) == ["loss", "lm_loss", "z_loss"]
    assert expected[0]["lm_loss"] == pytest.approx(without[0]["lm_loss"], rel=1e-6)
    assert expected[-1]["lm_loss"] != pytest.approx(without[-1]["lm_loss"], rel=1e-4)
    assert expected[-1]["z_loss"] < expected[0]["z_loss"]
    layouts = [{"pp": 2}, {"mp": 2}, {"zero": 1}, {"zero": 3}]
    plans = [tiny_plan(2, **layout, **KEYS) for layout in layouts]
    for layout, (trained, _) in zip(layouts, run_ranks(2, scores_of, plans, STEPS)[0], strict=True):
        for found, wanted in zip(trained, expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5), layout
            assert found["loss"] == pytest.approx(found["lm_loss"] + found["z_loss"], rel=1e-6)
