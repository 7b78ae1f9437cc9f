"""Identity preference optimization (IPO, arXiv:2310.12036, equation 17).

    r(answer) = (log p(answer) - log ref(answer)) / tokens of the answer
    loss      = (r(chosen) - r(rejected) - 1 / (2 tau))^2

The division by the number of tokens is not in the paper; TRL's maintainers confirmed it with the authors.
"""

from __future__ import annotations

from dataclasses import dataclass

from neox.objectives.dpo import LogRatioObjective, log_ratios
from neox.objectives.preferences import AnswerLogProbs, scores_of_pairs
from neox.objectives.scores import Row


@dataclass(frozen=True, kw_only=True)
class IPO(LogRatioObjective):
    """Weighted sum over pairs of the squared distance of the margin from 1 / (2 tau); `beta` is the paper's tau."""

    def pair_scores(self, log_probs: AnswerLogProbs) -> dict[str, Row]:
        """Return the rows of pairs. Rewards are those of DPO, without the division."""
        ratios = log_ratios(log_probs)
        chosen, rejected = (ratios / log_probs.lengths).unbind(-1)
        losses = (chosen - rejected - 1 / (2 * self.beta)) ** 2
        return scores_of_pairs(losses, self.beta * ratios, log_probs.sums, log_probs.targets.weights)
