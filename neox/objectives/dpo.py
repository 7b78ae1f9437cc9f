"""Direct preference optimization (DPO, arXiv:2305.18290), and its variant with a hinge.

    r(answer) = log p(answer) - log ref(answer)        sums over the tokens of the answer
    m         = beta (r(chosen) - r(rejected))
    DPO         -(1 - e) log sigmoid(m) - e log sigmoid(-m)       e: label smoothing (conservative DPO)
    Hinge       max(0, 1 - m)                                     SLiC, arXiv:2305.10425

Without a reference log ref is 0. IPO is in `ipo.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.objectives.preferences import AnswerLogProbs, PreferenceObjective, scores_of_pairs
from neox.objectives.scores import Row


@dataclass(frozen=True, kw_only=True)
class LogRatioObjective(PreferenceObjective):
    """Base of losses on log-ratios to a reference model, or on log-probabilities alone.

    Attributes:
        beta: Strength of the constraint to the reference, and factor of the reported rewards.
        with_reference: Whether batches hold `reference` [B, 2 P].
    """

    beta: float
    with_reference: bool = True

    @property
    def optional_targets(self) -> tuple[str, ...]:
        """The reference's log-probabilities, if there is a reference."""
        return ("reference",) if self.with_reference else ()


@dataclass(frozen=True, kw_only=True)
class DPO(LogRatioObjective):
    """Weighted sum over pairs of the logistic loss of the margin.

    Attributes:
        label_smoothing: Assumed probability that the labels of a pair are swapped.
    """

    label_smoothing: float = 0.0

    def pair_scores(self, log_probs: AnswerLogProbs) -> dict[str, Row]:
        """Return the rows of pairs."""
        ratios = log_ratios(log_probs)
        chosen, rejected = ratios.unbind(-1)
        margins = self.beta * (chosen - rejected)
        losses = -F.logsigmoid(margins) * (1 - self.label_smoothing)
        losses = losses - F.logsigmoid(-margins) * self.label_smoothing
        return scores_of_pairs(losses, self.beta * ratios, log_probs.sums, log_probs.targets.weights)


@dataclass(frozen=True, kw_only=True)
class Hinge(LogRatioObjective):
    """Weighted sum over pairs of the hinge loss of the margin."""

    leaves_tokens_out = True  # of pairs with a margin above 1

    def pair_scores(self, log_probs: AnswerLogProbs) -> dict[str, Row]:
        """Return the rows of pairs."""
        ratios = log_ratios(log_probs)
        chosen, rejected = ratios.unbind(-1)
        losses = torch.relu(1 - self.beta * (chosen - rejected))
        return scores_of_pairs(losses, self.beta * ratios, log_probs.sums, log_probs.targets.weights)


def log_ratios(log_probs: AnswerLogProbs) -> Tensor:
    """Return log p(answer) - log ref(answer) of both documents of each pair [B, P, 2]."""
    reference = log_probs.targets.reference
    if reference is None:
        return log_probs.sums
    return log_probs.sums - reference.view(log_probs.sums.shape)
