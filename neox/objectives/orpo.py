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

from neox.objectives.preferences import PAIR_SCORES, AnswerLogProbs, PreferenceObjective, paired_scores


@dataclass(frozen=True)
class ORPO(PreferenceObjective):
    """Mean over pairs of the preferred answer's loss and the loss of the odds ratio.

    Attributes:
        beta: Weight of the odds ratio, the paper's lambda.
    """

    counts_prompts = True
    names = (*PAIR_SCORES, "nll_loss", "log_odds_ratio", "log_odds_chosen")

    beta: float

    def pair_scores(self, found: AnswerLogProbs) -> list[Tensor]:
        """Return the scores of pairs. As in TRL, the reported log-probabilities are means over tokens."""
        weights = found.targets.weights
        # Where a row has no pair, any number below 0 keeps the logarithm finite.
        means = torch.where(weights.unsqueeze(-1) > 0, found.means, -1.0)
        chosen, rejected = (means - _log1mexp(means)).unbind(-1)
        log_odds = chosen - rejected
        ratio = F.logsigmoid(log_odds)
        nll = -found.document_means[..., 0]
        scores = paired_scores(nll - self.beta * ratio, self.beta * found.means, found.means, weights)
        for value in (nll, ratio, log_odds):
            scores.append((weights * value.detach()).sum())
        return scores


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, without loss of digits near 0."""
    near = x > -math.log(2)
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )
