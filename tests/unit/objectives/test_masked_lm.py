"""Masked language modelling: inputs, targets, scores."""

from __future__ import annotations

import pytest
import torch

from neox.model import GPT, Context, LMHead, NetworkOutput
from neox.objectives import MaskedLM, build_objective
from neox.parallel import ParallelGrid
from tests.losses import score_rows
from tests.masked_batches import masked_samples
from tests.plans import ENCODERS, small_plan

GRID = ParallelGrid.single()


def test_the_plan_chooses_it():
    assert build_objective(small_plan(**ENCODERS["bert"])) == MaskedLM(sentences=True)
    assert build_objective(small_plan(**ENCODERS["rotary without sentences"])) == MaskedLM(sentences=False)


def test_what_goes_between_stages_needs_no_gradient():
    plan = small_plan(**ENCODERS["bert"])
    inputs = build_objective(plan).inputs(masked_samples(plan, 0))
    assert list(inputs) == ["tokens", "token_types", "lengths"]
    assert not any(value.is_floating_point() for value in inputs.values())


def hand_made():
    hidden = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    pairs = torch.tensor([[1.0, -1.0], [0.5, 0.25]])
    head = LMHead(GRID, weight, lambda x: x @ weight.T, sentences=lambda x: pairs)
    positions, ids = torch.tensor([[2, 0], [1, 0]]), torch.tensor([[4, 0], [3, 2]])
    return (
        hidden,
        weight,
        pairs,
        head,
        (positions, ids, torch.tensor([[1.0, 0.0], [1.0, 1.0]]) / 3, torch.tensor([0, 1])),
    )


def test_the_loss_is_the_weighted_sum_of_masked_tokens_and_that_of_sentences():
    hidden, weight, pairs, head, targets = hand_made()
    logs = (hidden @ weight.T).log_softmax(-1)
    masked = -(logs[0, 2, 4] + logs[1, 1, 3] + logs[1, 0, 2]) / 3
    sentences = -(pairs.log_softmax(-1)[0, 0] + pairs.log_softmax(-1)[1, 1]) / 2
    objective = MaskedLM(sentences=True)
    scores = objective.scores(NetworkOutput(hidden, head, {}), targets)
    expected = {"loss": masked + sentences, "lm_loss": masked, "sentence_loss": sentences, "sentence_accuracy": 0.5}
    assert score_rows(objective, scores) == pytest.approx({name: float(value) for name, value in expected.items()})
    assert objective.names == tuple(expected)
    torch.testing.assert_close(scores[0], masked + sentences)
    alone = MaskedLM(sentences=False)
    output = NetworkOutput(hidden, head._replace(sentences=None), {})
    torch.testing.assert_close(alone.scores(output, targets)[0], masked)
    assert alone.names == ("lm_loss",)


def test_a_batch_without_masked_tokens_trains_sentences_alone():
    hidden, _, _, head, (positions, ids, weights, follows) = hand_made()
    output = NetworkOutput(hidden, head, {})
    objective = MaskedLM(sentences=True)
    packed = objective.scores(output, (positions, ids, weights * 0, follows))
    found = score_rows(objective, packed)
    assert found["lm_loss"] is None
    assert found["loss"] is None
    assert found["sentence_loss"] == pytest.approx(packed[0].item())


@pytest.mark.parametrize("name", ENCODERS)
def test_padding_and_later_samples_change_nothing_and_later_tokens_do(name: str):
    plan = small_plan(**ENCODERS[name])
    model = GPT(plan, GRID).eval()
    tokens = torch.randint(2, 100, (2, 16), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([10, 16])
    hidden = model.hidden(tokens, Context(lengths=lengths))
    changed = tokens.clone()
    changed[0, 10:] = 5
    torch.testing.assert_close(model.hidden(changed, Context(lengths=lengths))[0, :10], hidden[0, :10])
    torch.testing.assert_close(model.hidden(tokens[:1, :10]), hidden[:1, :10])
    changed[0, 9] = 99 - changed[0, 9]
    assert (model.hidden(changed, Context(lengths=lengths))[0, 0] - hidden[0, 0]).abs().max() > 1e-6
