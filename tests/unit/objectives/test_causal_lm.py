"""Causal language modelling: inputs, targets, scores."""

from __future__ import annotations

import pytest
import torch

from neox.model import GPT, LMHead, NetworkOutput
from neox.objectives import CausalLM, build_objective
from neox.parallel import ParallelGrid
from tests.losses import causal_lm_loss, score_rows
from tests.plans import small_plan

TOKENS = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(0))
GRID = ParallelGrid.single()


def test_a_batch_is_split_between_the_first_and_the_last_stage():
    objective = build_objective(small_plan())
    batch = {"tokens": TOKENS, "labels": TOKENS + 1, "loss_mask": torch.ones(2, 12)}
    assert list(objective.inputs(batch)) == ["tokens"]
    assert list(objective.inputs({**batch, "document_starts": TOKENS})) == ["tokens", "document_starts"]
    labels, mask = objective.targets(batch)
    assert labels is batch["labels"]
    assert mask is batch["loss_mask"]


def test_the_loss_is_the_weighted_sum_of_the_labels_losses():
    hidden = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([[1, 2, 3], [4, 0, 1]])
    weights = torch.tensor([[0.5, 0.0, 0.2], [0.0, 0.1, 0.0]])
    head = LMHead(GRID, weight, lambda hidden: hidden @ weight.T)
    picked = head.logits(hidden).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    objective = CausalLM()
    output = NetworkOutput(hidden, head, {})
    torch.testing.assert_close(objective.scores(output, (labels, weights))[0], -(picked * weights).sum())
    no_labels = objective.scores(output, (labels, torch.zeros(2, 3)))
    assert no_labels[0] == 0.0
    assert score_rows(objective, no_labels) == {"lm_loss": None}


@pytest.mark.parametrize("untied", [True, False])
def test_loss_and_gradients_are_those_of_the_logits(untied: bool):
    labels, mask = TOKENS.roll(-1, 1), (TOKENS > 20).float()
    results = []
    for whole in (True, False):
        model = GPT(small_plan(no_weight_tying=untied), GRID)
        if whole:
            losses = torch.nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), labels.flatten(), reduction="none")
            loss = (losses * mask.flatten()).sum() / mask.sum()
        else:
            loss = causal_lm_loss(model, TOKENS, labels, mask)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
