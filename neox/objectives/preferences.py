"""Common part of the losses of preferences: log-probabilities of answers, and training through them.

A loss L of preferences is a function of sums over tokens (the log-probability of an answer), so how much a token counts
in the gradient is known only after all log-probabilities are. Therefore the head runs twice, on the same hidden states:

    1. l_i = log p(token i)                       without a graph, a few logits at a time
       L(l), and its derivatives w_i = dL / dl_i  plain autograd over a short vector
    2. S = sum_i -w_i CE_i,  CE_i = -l_i          weighted cross entropies, as in language modelling

S has the gradient of L, because dS = sum_i w_i dl_i = dL, and no step ever holds the logits of all tokens. The reported
loss is L.

Context ranks divide the tokens of a row. Each sums the log-probabilities of its own, and the sums over all ranks are
those of whole answers. So each rank computes the same L, and the S of its tokens.

A pair is two documents, each a prompt with an answer.

Legend: B rows, S positions of a row, P most pairs of a row, H hidden, R tokens that count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from neox.data.answer_pairs.answers import ANSWERS_PER_PAIR
from neox.model import LMHead, NetworkOutput
from neox.objectives.causal_lm import network_inputs
from neox.objectives.scores import Reduction, Row, pack_scores
from neox.parallel import ParallelGrid, total_of_context_ranks

PAIR_SCORES = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
"""Scores of pairs, with TRL's names; `scores_of_pairs` computes them."""


class AnswerTargets(NamedTuple):
    """Targets of rows of pairs (`neox.data.answer_pairs.pair_rows.layout_rows`).

    Attributes:
        labels: Next tokens [B, S].
        document_index: Number of each position's document in its row; negative for padding [B, S].
        in_answer: 1 if the label belongs to the answer, 0 if it belongs to the prompt [B, S].
        weights: Weight of each pair in the loss, 0 if there is no such pair [B, P]. They follow from
            `loss_normalization`; those of a micro batch sum to 1 unless the step is normalized as a whole.
        reference: Log-probabilities of the answers by the reference model [B, 2 P], if the loss uses them.
        desirable: 1 for each good answer, 0 for each bad one [B, P], if answers are judged one by one.
    """

    labels: Tensor
    document_index: Tensor
    in_answer: Tensor
    weights: Tensor
    reference: Tensor | None = None
    desirable: Tensor | None = None

    @classmethod
    def of_batch(cls, batch: Mapping[str, Tensor]) -> AnswerTargets:
        """Return the targets that every loss uses."""
        return cls(batch["labels"], batch["slots"], batch["in_answer"], batch["pair_mask"])


@dataclass(frozen=True)
class AnswerLogProbs:
    """Log-probabilities of the documents of pairs.

    Attributes:
        targets: The targets.
        sums: Sum over the tokens of each answer [B, P, 2].
        lengths: Number of tokens of each answer, at least 1 [B, P, 2].
        document_means: Mean over all counted tokens of each document [B, P, 2]: of answer and prompt if the objective
            `counts_prompts`, else of the answer.
        grid: Process groups.
    """

    targets: AnswerTargets
    sums: Tensor
    lengths: Tensor
    document_means: Tensor
    grid: ParallelGrid

    @property
    def means(self) -> Tensor:
        """Mean over the tokens of each answer [B, P, 2]."""
        return self.sums / self.lengths


class PreferenceObjective(ABC):
    """An `Objective` whose loss is a function of the log-probabilities of answers.

    A batch holds the fields of `neox.data.answer_pairs.pair_rows.PreferenceDataset`.
    """

    label_mask = "pair_mask"
    names: tuple[str, ...] = PAIR_SCORES
    per_token: tuple[str, ...] = ()
    reductions: ClassVar[Mapping[str, Reduction]] = MappingProxyType({})
    counts_prompts = False
    """Whether the loss also needs the log-probabilities of prompts."""
    leaves_tokens_out = False
    """Whether many tokens have a derivative of exactly 0, and are left out of the second pass through the head. The
    host waits for their number."""

    @property
    def optional_targets(self) -> tuple[str, ...]:
        """Further fields of the batch, and of `AnswerTargets`, that the loss uses."""
        return ()

    @abstractmethod
    def pair_scores(self, log_probs: AnswerLogProbs) -> dict[str, Row]:
        """Return the rows of the scores. The loss, whose total is trained, comes first, and only it has a gradient."""

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the network's inputs."""
        return network_inputs(batch)

    def targets(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the fields of `AnswerTargets` that the loss uses, in their order."""
        targets = AnswerTargets.of_batch(batch)
        optional = (batch[name] for name in self.optional_targets)
        return (targets.labels, targets.document_index, targets.in_answer, targets.weights, *optional)

    def scores(self, output: NetworkOutput, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the packed scores of a micro batch; the loss has a gradient in training."""
        labels, document_index, in_answer, weights, *optional = targets
        by_name = dict(zip(self.optional_targets, optional, strict=True))
        answers = AnswerTargets(labels, document_index, in_answer, weights, **by_name)
        tokens = select_tokens(output, answers, with_prompts=self.counts_prompts)
        if torch.is_grad_enabled():
            return self._scores_for_training(tokens, answers)
        return self._scores_from_log_probs(tokens.log_probs(), tokens, answers)

    def _scores_from_log_probs(self, token_log_probs: Tensor, tokens: CountedTokens, answers: AnswerTargets) -> Tensor:
        """Return the scores as a function of the tokens' log-probabilities [R]."""
        log_probs = sum_by_document(token_log_probs, tokens.positions, answers, tokens.head.grid)
        rows = self.pair_scores(log_probs)
        return pack_scores(rows["loss"][0], rows.values())

    def _scores_for_training(self, tokens: CountedTokens, answers: AnswerTargets) -> Tensor:
        """Return the scores, where the loss L has the gradient of S (formula at the top)."""
        token_log_probs = tokens.log_probs().requires_grad_()
        scores = self._scores_from_log_probs(token_log_probs, tokens, answers)
        (derivatives,) = torch.autograd.grad(scores[0], token_log_probs)
        surrogate = tokens.cross_entropy(-derivatives, skip_zeros=self.leaves_tokens_out)
        scores = scores.detach()
        loss = scores[0] + (surrogate - surrogate.detach())  # L's value, S's gradient
        return torch.cat((loss.unsqueeze(0), scores[1:]))


@dataclass(frozen=True)
class CountedTokens:
    """The tokens whose log-probabilities a loss uses.

    Attributes:
        head: The network's head.
        hidden: Hidden states that predict them [R, H].
        labels: Their ids [R].
        positions: Their positions in the flattened rows [R].
    """

    head: LMHead
    hidden: Tensor
    labels: Tensor
    positions: Tensor

    def log_probs(self) -> Tensor:
        """Return the log-probabilities of the tokens [R] (no graph)."""
        return self.head.log_probs(self.hidden, self.labels)

    def cross_entropy(self, weights: Tensor, *, skip_zeros: bool) -> Tensor:
        """Return the weighted sum of the tokens' cross entropies.

        Args:
            weights: Weights of the tokens [R].
            skip_zeros: Whether nothing is computed for tokens of weight 0.
        """
        if not skip_zeros:
            return self.head.cross_entropy(self.hidden, self.labels, weights)
        used = weights.nonzero().squeeze(1)
        if len(used) in (0, len(weights)):
            return self.head.cross_entropy(self.hidden, self.labels, weights)
        return self.head.cross_entropy(self.hidden[used], self.labels[used], weights[used])


def select_tokens(output: NetworkOutput, targets: AnswerTargets, *, with_prompts: bool) -> CountedTokens:
    """Pick the tokens of answers, or of answers and prompts, from all positions."""
    counts = targets.document_index >= 0
    if not with_prompts:
        counts = counts & (targets.in_answer > 0)
    positions = counts.flatten().nonzero().squeeze(1)  # [R]
    hidden = output.hidden.flatten(0, 1)[positions]  # [B x S, H] -> [R, H]
    return CountedTokens(output.head, hidden, targets.labels.flatten()[positions], positions)


def sum_by_document(
    token_log_probs: Tensor, positions: Tensor, targets: AnswerTargets, grid: ParallelGrid
) -> AnswerLogProbs:
    """Sum the log-probabilities of tokens over answers, and average them over documents.

    Args:
        token_log_probs: Log-probabilities of the tokens that count [R].
        positions: Their positions in the flattened rows [R].
        targets: The targets.
        grid: Process groups.
    """
    rows, pairs = targets.weights.shape
    documents_of_row = ANSWERS_PER_PAIR * pairs
    # Documents of all rows are numbered one after another. Padding is among no `positions`.
    first_of_row = documents_of_row * torch.arange(rows, device=positions.device).unsqueeze(1)  # [B, 1]
    document = (first_of_row + targets.document_index).flatten()[positions]  # [R]
    in_answer = targets.in_answer.flatten()[positions].float()  # [R]

    of_tokens = (token_log_probs * in_answer, in_answer, token_log_probs, torch.ones_like(in_answer))
    totals = torch.zeros(rows * documents_of_row, len(of_tokens), device=positions.device)
    totals = totals.index_add(0, document, torch.stack(of_tokens, dim=1))
    totals = total_of_context_ranks(totals, grid).view(rows, pairs, ANSWERS_PER_PAIR, len(of_tokens))
    sums, answer_lengths, document_sums, document_lengths = totals.unbind(-1)  # [B, P, 2] each
    lengths = answer_lengths.clamp(min=1)
    document_means = document_sums / document_lengths.clamp(min=1)
    return AnswerLogProbs(targets, sums, lengths, document_means, grid)


def answer_sums(output: NetworkOutput, targets: AnswerTargets) -> Tensor:
    """Return the summed log-probabilities of answers by a network [B, P, 2] (no graph)."""
    tokens = select_tokens(output, targets, with_prompts=False)
    return sum_by_document(tokens.log_probs(), tokens.positions, targets, output.head.grid).sums


def scores_of_pairs(losses: Tensor, rewards: Tensor, log_probs: Tensor, weights: Tensor) -> dict[str, Row]:
    """Return the rows of `PAIR_SCORES`: a weighted sum of losses, and sums of what is reported, over pairs.

    Args:
        losses: Loss of each pair [B, P].
        rewards: Rewards of both answers [B, P, 2].
        log_probs: Log-probabilities of both answers, as they are reported [B, P, 2].
        weights: Weights of pairs [B, P].
    """
    chosen, rejected = rewards.detach().unbind(-1)
    chosen_log_probs, rejected_log_probs = log_probs.detach().unbind(-1)
    of_pairs = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "logps/chosen": chosen_log_probs,
        "logps/rejected": rejected_log_probs,
    }
    return {"loss": ((weights * losses).sum(), weights.sum()), **sums_over_pairs(of_pairs, weights)}


def sums_over_pairs(values: Mapping[str, Tensor], weights: Tensor) -> dict[str, Row]:
    """Return the rows of numbers of pairs [B, P], each of which counts once if its weight [B, P] is not 0."""
    exists = weights > 0
    count = exists.sum()
    return {name: (value.detach().masked_fill(~exists, 0.0).sum(), count) for name, value in values.items()}
