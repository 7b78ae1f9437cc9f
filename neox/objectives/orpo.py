"""Odds ratio preference optimization (ORPO, arXiv:2403.07691).

    a(answer)    = mean over its tokens of log p
    log odds     = a(answer) - log(1 - exp a(answer))
    loss         = nll(chosen) - lambda log sigmoid(log odds(chosen) - log odds(rejected))

nll is the mean over all tokens of the preferred answer and its prompt, as in the authors' code and TRL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.objectives.preferences import (
    PAIR_SCORES,
    AnswerLogProbs,
    PreferenceObjective,
    scores_of_pairs,
    sums_over_pairs,
)
from neox.objectives.scores import Row


@dataclass(frozen=True)
class ORPO(PreferenceObjective):
    """Weighted sum over pairs of the preferred answer's loss and the loss of the odds ratio.

    Attributes:
        beta: Weight of the odds ratio, the paper's lambda.
    """

    counts_prompts = True
    leaves_tokens_out = True  # prompts of the other answers
    names = (*PAIR_SCORES, "nll_loss", "log_odds_ratio", "log_odds_chosen")

    beta: float

    def pair_scores(self, log_probs: AnswerLogProbs) -> dict[str, Row]:
        """Return the rows of pairs. As in TRL, the reported log-probabilities are means over tokens."""
        weights = log_probs.targets.weights
        # Where a row has no pair, any number below 0 keeps the logarithm finite.
        means = torch.where(weights.unsqueeze(-1) > 0, log_probs.means, -1.0)
        chosen, rejected = (means - _log1mexp(means)).unbind(-1)
        log_odds = chosen - rejected
        ratio = F.logsigmoid(log_odds)
        nll = -log_probs.document_means[..., 0]
        losses = nll - self.beta * ratio
        return {
            **scores_of_pairs(losses, self.beta * log_probs.means, log_probs.means, weights),
            **sums_over_pairs({"nll_loss": nll, "log_odds_ratio": ratio, "log_odds_chosen": log_odds}, weights),
        }


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, without loss of digits near 0."""
    near = x > -math.log(2)
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )
