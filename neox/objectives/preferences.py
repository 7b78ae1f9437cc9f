"""Common part of the losses of preferences: log-probabilities of answers, and training through them.

Legend: B rows, S positions of a row, P most pairs of a row, H hidden, R tokens that count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from neox.data.answer_pairs.answers import ANSWERS_PER_PAIR
from neox.model import LMHead, NetworkOutput
from neox.parallel import ParallelGrid

PAIR_SCORES = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
"""Scores of pairs, with TRL's names."""


class AnswerTargets(NamedTuple):
    """Fields of rows of pairs that the scores need next to the network's output (`pair_rows.layout_rows`).

    Attributes:
        labels: Next tokens [B, S].
        slots: Number of each position's document in its row; negative for padding [B, S].
        in_answer: 1 if the label belongs to the answer [B, S].
        weights: Weight of each pair, 0 if there is none [B, P].
        extra: The first of an objective's further fields, if it has any.
        second_extra: The second one.
    """

    labels: Tensor
    slots: Tensor
    in_answer: Tensor
    weights: Tensor
    extra: Tensor | None = None
    second_extra: Tensor | None = None


@dataclass(frozen=True)
class AnswerLogProbs:
    """Log-probabilities of the documents of pairs.

    Attributes:
        targets: The targets.
        sums: Sum over the tokens of each answer [B, P, 2].
        counts: Number of these tokens, at least 1 [B, P, 2].
        document_means: Mean over all tokens of each document, its prompt included; 0 unless the objective counts
            prompts [B, P, 2].
        grid: Process groups.
    """

    targets: AnswerTargets
    sums: Tensor
    counts: Tensor
    document_means: Tensor
    grid: ParallelGrid

    @property
    def means(self) -> Tensor:
        """Mean over the tokens of each answer [B, P, 2]."""
        return self.sums / self.counts


class PreferenceObjective(ABC):
    """Loss of the log-probabilities of answers.

    A batch holds the fields of `neox.data.answer_pairs.pair_rows.PreferenceDataset`.
    """

    label_mask = "pair_mask"
    per_token: tuple[str, ...] = ()
    names: tuple[str, ...] = PAIR_SCORES
    counts_prompts = False
    """Whether the loss also needs the log-probabilities of prompts."""

    @property
    def extra_fields(self) -> Sequence[str]:
        """Further fields of a batch that the scores need, at most two."""
        return ()

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tokens, and the positions where their documents start [B, S]."""
        return inputs_of_rows(batch)

    def targets(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the fields of `AnswerTargets`."""
        common = (batch["labels"], batch["slots"], batch["in_answer"], batch["pair_mask"])
        return (*common, *(batch[name] for name in self.extra_fields))

    def scores(self, output: NetworkOutput, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the scores of a micro batch in fp32, one for each of `names`.

        The loss is a function of sums over tokens, so the weight of a token in the gradient is known only after all
        log-probabilities are. They are computed first, without a gradient. The loss's derivatives by them are then the
        weights of cross entropies, through which the network is trained.
        """
        given = AnswerTargets(*targets)
        tokens = CountedTokens.of(output, given, counts_prompts=self.counts_prompts)
        with torch.enable_grad():
            log_probs = tokens.log_probs().requires_grad_()
            scores = torch.stack(self.pair_scores(sum_over_answers(log_probs, tokens.places, given, tokens.head.grid)))
        if not torch.is_grad_enabled():
            return scores.detach()
        (derivatives,) = torch.autograd.grad(scores[0], log_probs)
        loss = tokens.cross_entropy(-derivatives)
        scores = scores.detach()
        with_gradient = scores[0] + (loss - loss.detach())
        return torch.cat((with_gradient.unsqueeze(0), scores[1:]))

    @abstractmethod
    def pair_scores(self, found: AnswerLogProbs) -> list[Tensor]:
        """Return each score as a scalar, the loss first. Only the loss may pass a gradient."""


def inputs_of_rows(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the network's inputs: tokens [B, S], lengths [B] if the batch has them, and document starts [B, S]."""
    return {name: batch[name] for name in ("tokens", "lengths", "document_starts") if name in batch}


@dataclass(frozen=True)
class CountedTokens:
    """Tokens whose log-probabilities count.

    Attributes:
        head: The network's head.
        hidden: Hidden states [R, H].
        labels: Next tokens [R].
        places: Positions in the flattened rows [R].
    """

    head: LMHead
    hidden: Tensor
    labels: Tensor
    places: Tensor

    @classmethod
    def of(cls, output: NetworkOutput, targets: AnswerTargets, *, counts_prompts: bool) -> CountedTokens:
        """Return the tokens of answers, or of answers and prompts."""
        counted = targets.slots >= 0
        if not counts_prompts:
            counted = counted & (targets.in_answer > 0)
        places = counted.flatten().nonzero().squeeze(1)
        hidden = output.hidden.flatten(0, 1)[places]
        return cls(output.head, hidden, targets.labels.flatten()[places], places)

    def log_probs(self) -> Tensor:
        """Return their log-probabilities, without a gradient [R]."""
        return self.head.log_probs(self.hidden, self.labels)

    def cross_entropy(self, weights: Tensor) -> Tensor:
        """Return the weighted sum of their cross entropies. Tokens of weight 0 are left out."""
        used = weights.nonzero().squeeze(1)
        if len(used) in (0, len(weights)):
            return self.head.cross_entropy(self.hidden, self.labels, weights)
        return self.head.cross_entropy(self.hidden[used], self.labels[used], weights[used])


def log_probs_of_answers(output: NetworkOutput, targets: AnswerTargets) -> AnswerLogProbs:
    """Return the log-probabilities of answers by a network, without a gradient."""
    tokens = CountedTokens.of(output, targets, counts_prompts=False)
    return sum_over_answers(tokens.log_probs(), tokens.places, targets, output.head.grid)


def sum_over_answers(
    token_log_probs: Tensor, places: Tensor, targets: AnswerTargets, grid: ParallelGrid
) -> AnswerLogProbs:
    """Sum log-probabilities of tokens over documents.

    Args:
        token_log_probs: Log-probabilities of the tokens that count [R].
        places: Their positions in the flattened rows [R].
        targets: The targets.
        grid: Process groups.
    """
    rows, pairs = targets.weights.shape
    slots_of_row = ANSWERS_PER_PAIR * pairs
    row = torch.arange(rows, device=places.device).unsqueeze(1)
    document = (row * slots_of_row + targets.slots).flatten()[places]
    in_answer = targets.in_answer.flatten()[places].float()
    nothing = torch.zeros(rows * slots_of_row, device=places.device)
    sums = nothing.index_add(0, document, token_log_probs * in_answer)
    counts = nothing.index_add(0, document, in_answer)
    lengths = nothing.index_add(0, document, torch.ones_like(in_answer))
    totals = nothing.index_add(0, document, token_log_probs)
    shape = (rows, pairs, ANSWERS_PER_PAIR)
    means = totals / lengths.clamp(min=1)
    return AnswerLogProbs(targets, sums.view(shape), counts.clamp(min=1).view(shape), means.view(shape), grid)


def paired_scores(losses: Tensor, rewards: Tensor, log_probs: Tensor, weights: Tensor) -> list[Tensor]:
    """Return the scores `PAIR_SCORES`.

    Args:
        losses: Loss of each pair [B, P].
        rewards: Rewards of both answers [B, P, 2].
        log_probs: Log-probabilities of both answers, as they are reported [B, P, 2].
        weights: Weights of pairs [B, P].
    """
    chosen, rejected = rewards.detach().unbind(-1)
    chosen_log_probs, rejected_log_probs = log_probs.detach().unbind(-1)
    values = (
        losses,
        chosen,
        rejected,
        chosen - rejected,
        (chosen > rejected).float(),
        chosen_log_probs,
        rejected_log_probs,
    )
    return [(weights * value).sum() for value in values]


def mean_over_ranks(values: Tensor, given: Tensor, grid: ParallelGrid) -> Tensor:
    """Return the mean of the values for which `given` is 1, over all data ranks; 0 if there are none."""
    totals = torch.stack(((values * given).sum(), given.sum()))
    if grid.dp_size > 1:
        dist.all_reduce(totals, group=grid.dp_group)
    return totals[0] / totals[1].clamp(min=1)
