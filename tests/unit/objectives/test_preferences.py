"""Losses of preferences against their formulas in plain torch, and training through log-probabilities."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from neox.model import NetworkOutput
from neox.model.embedding import LMHead
from neox.objectives.dpo import DPO, Hinge
from neox.objectives.ipo import IPO
from neox.objectives.kto import KTO
from neox.objectives.orpo import ORPO
from neox.objectives.preferences import AnswerLogProbs, AnswerTargets, PreferenceObjective
from neox.objectives.scores import ScoreTable, pack_scores
from neox.objectives.simpo import SimPO
from neox.parallel import ParallelGrid
from tests.losses import score_rows

ONE_RANK = cast(ParallelGrid, SimpleNamespace(dp_size=1, cp_size=1, tp_size=1, tp_rank=0, tp_group=None))
seeds = settings(max_examples=30)


def answers(seed: int, *, rows: int = 2, pairs: int = 3) -> AnswerLogProbs:
    """Random log-probabilities of pairs, the last of which does not exist."""
    generator = torch.Generator().manual_seed(seed)
    sums = -30 * torch.rand(rows, pairs, 2, generator=generator) - 1e-3
    reference = -30 * torch.rand(rows, 2 * pairs, generator=generator)
    counts = torch.randint(1, 9, sums.shape, generator=generator).float()
    weights = torch.full((rows, pairs), 1 / (rows * pairs - 1))
    weights[-1, -1] = 0
    sums[-1, -1] = 0
    desirable = torch.randint(0, 2, (rows, pairs), generator=generator)
    nothing = torch.empty(0)
    targets = AnswerTargets(nothing, nothing, nothing, weights, reference, desirable)
    return AnswerLogProbs(targets, sums, counts, sums / 20, ONE_RANK)


def lists(found: AnswerLogProbs) -> tuple[list[Any], ...]:
    """Sums, references, counts, means of documents and judgements of the pairs that exist, as numbers."""
    exists = found.targets.weights.flatten() > 0
    assert found.targets.reference is not None
    assert found.targets.desirable is not None
    columns = (
        found.sums.flatten(0, 1),
        found.targets.reference.view(-1, 2),
        found.lengths.flatten(0, 1),
        found.document_means.flatten(0, 1),
        found.targets.desirable.flatten(),
    )
    return tuple(column[exists].double().tolist() for column in columns)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def check(objective: PreferenceObjective, found: AnswerLogProbs, expected: list[float]) -> dict[str, float | None]:
    rows = objective.pair_scores(found)
    assert tuple(rows) == ScoreTable(objective).rows
    scores = score_rows(objective, pack_scores(rows["loss"][0], rows.values()))
    assert tuple(scores) == objective.names
    assert scores["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-6, abs=1e-6)
    assert rows["loss"][0].item() == pytest.approx(scores["loss"], rel=1e-6), "which is trained"
    return scores


@seeds
@given(seed=st.integers(0, 10**6), beta=st.floats(0.01, 2), smoothing=st.floats(0, 0.49))
def test_dpo(seed: int, beta: float, smoothing: float) -> None:
    found = answers(seed)
    sums, reference, *_ = lists(found)
    margins = [(s[0] - r[0]) - (s[1] - r[1]) for s, r in zip(sums, reference, strict=True)]
    sigmoid = [-(1 - smoothing) * log_sigmoid(beta * m) - smoothing * log_sigmoid(-beta * m) for m in margins]
    scores = check(DPO(beta=beta, label_smoothing=smoothing), found, sigmoid)
    assert scores["rewards/accuracies"] == pytest.approx(sum(m > 0 for m in margins) / len(margins))
    assert scores["rewards/margins"] == pytest.approx(beta * sum(margins) / len(margins), rel=1e-5, abs=1e-5)
    assert scores["logps/chosen"] == pytest.approx(sum(s[0] for s in sums) / len(sums), rel=1e-5)
    check(Hinge(beta=beta), found, [max(0.0, 1 - beta * m) for m in margins])


@seeds
@given(seed=st.integers(0, 10**6), beta=st.floats(0.05, 2))
def test_ipo(seed: int, beta: float) -> None:
    found = answers(seed)
    sums, reference, counts, *_ = lists(found)
    expected = []
    for s, r, c in zip(sums, reference, counts, strict=True):
        expected.append(((s[0] - r[0]) / c[0] - (s[1] - r[1]) / c[1] - 1 / (2 * beta)) ** 2)
    check(IPO(beta=beta), found, expected)


@seeds
@given(seed=st.integers(0, 10**6), beta=st.floats(0.1, 3), gamma=st.floats(0, 2))
def test_simpo(seed: int, beta: float, gamma: float) -> None:
    found = answers(seed)
    sums, _, counts, *_ = lists(found)
    expected = [-log_sigmoid(beta * (s[0] / c[0] - s[1] / c[1]) - gamma) for s, c in zip(sums, counts, strict=True)]
    check(SimPO(beta, gamma), found, expected)


@seeds
@given(seed=st.integers(0, 10**6), beta=st.floats(0.01, 1))
def test_orpo(seed: int, beta: float) -> None:
    found = answers(seed)
    sums, _, counts, means, _ = lists(found)
    expected = []
    for s, c, mean in zip(sums, counts, means, strict=True):
        odds = [p / c_ - math.log(-math.expm1(p / c_)) for p, c_ in zip(s, c, strict=True)]
        expected.append(-mean[0] - beta * log_sigmoid(odds[0] - odds[1]))
    check(ORPO(beta), found, expected)


@seeds
@given(seed=st.integers(0, 10**6), beta=st.floats(0.01, 1), good=st.floats(0, 2), bad=st.floats(0, 2))
def test_kto(seed: int, beta: float, good: float, bad: float) -> None:
    found = answers(seed)
    sums, reference, _, _, desirable = lists(found)
    kl = max(0.0, sum(s[1] - r[1] for s, r in zip(sums, reference, strict=True)) / len(sums))
    expected = []
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for s, r, is_good in zip(sums, reference, desirable, strict=True):
        ratio = s[0] - r[0]
        sign = 1 if is_good else -1
        weight = good if is_good else bad
        expected.append(weight * (1 - 1 / (1 + math.exp(-sign * beta * (ratio - kl)))))
        rewards[bool(is_good)].append(beta * ratio)
    scores = check(KTO(beta, good, bad), found, expected)
    assert scores["kl"] == pytest.approx(kl, rel=1e-5, abs=1e-5)
    for name, values in (("rewards/chosen", rewards[True]), ("rewards/rejected", rewards[False])):
        if not values:
            assert scores[name] is None
            assert scores["rewards/margins"] is None
            continue
        assert scores[name] == pytest.approx(sum(values) / len(values), rel=1e-5, abs=1e-5)


def test_without_a_reference_log_probabilities_count_themselves() -> None:
    found = answers(3)
    free = AnswerLogProbs(
        found.targets._replace(reference=None), found.sums, found.lengths, found.document_means, ONE_RANK
    )
    zero = found.targets._replace(reference=torch.zeros_like(cast(torch.Tensor, found.targets.reference)))
    same = AnswerLogProbs(zero, found.sums, found.lengths, found.document_means, ONE_RANK)
    objective = DPO(beta=0.1, with_reference=False)
    assert objective.optional_targets == ()
    assert objective.pair_scores(free) == objective.pair_scores(same)


@pytest.mark.parametrize(
    "objective",
    [DPO(beta=0.3), Hinge(beta=0.3), IPO(beta=0.5), SimPO(2.0, 0.5), ORPO(0.2), KTO(0.4)],
)
def test_gradients_are_those_of_plain_torch(objective: PreferenceObjective) -> None:
    """Two rows: two pairs, and one with padding. Gradients of hidden states and of the head, and the loss."""
    torch.manual_seed(1)
    hidden = torch.randn(2, 12, 8, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)
    labels = torch.randint(0, 20, (2, 12))
    slots = torch.tensor([[0] * 3 + [1] * 4 + [2] * 2 + [3] * 3, [0] * 5 + [1] * 4 + [-1] * 3])
    in_answer = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1], [0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0]])
    weights = torch.tensor([[1 / 3, 1 / 3], [1 / 3, 0]])
    extra = {"reference": -torch.rand(2, 4), "desirable": torch.tensor([[1, 0], [1, 0]])}
    optional = {name: extra[name] for name in objective.optional_targets}
    targets = AnswerTargets(labels, slots, in_answer, weights, **optional)
    head = LMHead(ONE_RANK, weight, lambda x: x @ weight.t())
    scores = objective.scores(NetworkOutput(hidden, head, {}), tuple(item for item in targets if item is not None))
    scores[0].backward()

    other_hidden = hidden.detach().clone().requires_grad_()
    other_weight = weight.detach().clone().requires_grad_()
    log_probs = F.log_softmax(other_hidden @ other_weight.t(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    one_hot = F.one_hot(slots.clamp(min=0), 4) * (slots >= 0).unsqueeze(-1)  # [B, S, slots]
    of_answers = one_hot * in_answer.unsqueeze(-1)
    sums = (log_probs.unsqueeze(-1) * of_answers).sum(1).view(2, 2, 2)
    counts = of_answers.sum(1).clamp(min=1).view(2, 2, 2)
    means = ((log_probs.unsqueeze(-1) * one_hot).sum(1) / one_hot.sum(1).clamp(min=1)).view(2, 2, 2)
    named = objective.pair_scores(AnswerLogProbs(targets, sums, counts, means, ONE_RANK))
    expected = pack_scores(named["loss"][0], named.values())
    expected[0].backward()
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad, other_hidden.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, other_weight.grad, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        evaluated = objective.scores(NetworkOutput(hidden, head, {}), tuple(t for t in targets if t is not None))
    torch.testing.assert_close(evaluated, expected.detach(), rtol=1e-5, atol=1e-6)


def test_a_context_rank_may_hold_padding_alone() -> None:
    """Its backward pass takes place, because other ranks wait for it in the layers below."""
    hidden = torch.randn(1, 6, 8, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)
    nothing = torch.zeros(1, 6, dtype=torch.long)
    targets = (nothing, nothing - 1, nothing, torch.ones(1, 1))
    head = LMHead(ONE_RANK, weight, lambda x: x @ weight.t())
    scores = DPO(beta=0.3, with_reference=False).scores(NetworkOutput(hidden, head, {}), targets)
    scores[0].backward()
    assert scores[0].item() == pytest.approx(math.log(2))
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert weight.grad is not None
    assert not weight.grad.any()
