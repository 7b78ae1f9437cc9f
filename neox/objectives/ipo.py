"""Identity preference optimization (IPO, arXiv:2310.12036, equation 17).

    r(answer) = (log p(answer) - log ref(answer)) / tokens of the answer
    loss      = (r(chosen) - r(rejected) - 1 / (2 tau))^2

The division by the number of tokens is not in the paper; its authors confirmed it to TRL.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from neox.objectives.dpo import AgainstReference, log_ratios
from neox.objectives.preferences import AnswerLogProbs, paired_scores


@dataclass(frozen=True, kw_only=True)
class IPO(AgainstReference):
    """Mean over pairs of the squared distance of the margin from a target; `beta` is the paper's tau."""

    def pair_scores(self, found: AnswerLogProbs) -> list[Tensor]:
        """Return the scores of pairs."""
        ratios = log_ratios(found)
        chosen, rejected = (ratios / found.counts).unbind(-1)
        losses = (chosen - rejected - 1 / (2 * self.beta)) ** 2
        return paired_scores(losses, self.beta * ratios, found.sums, found.targets.weights)
