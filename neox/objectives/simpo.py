"""Simple preference optimization with a reference-free reward (SimPO, arXiv:2405.14734).

r(answer) = beta mean over its tokens of log p
loss      = -log sigmoid(r(chosen) - r(rejected) - gamma)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F

from neox.objectives.preferences import AnswerLogProbs, PreferenceObjective, scores_of_pairs
from neox.objectives.scores import Row


@dataclass(frozen=True)
class SimPO(PreferenceObjective):
    """Weighted sum over pairs of the logistic loss of the margin between mean log-probabilities.

    Attributes:
        beta: Factor of the mean log-probabilities.
        gamma: Margin by which the preferred answer is to be better.
    """

    beta: float
    gamma: float

    def pair_scores(self, log_probs: AnswerLogProbs) -> dict[str, Row]:
        """Return the rows of pairs. As in TRL, the reported log-probabilities are means over tokens."""
        rewards = self.beta * log_probs.means
        chosen, rejected = rewards.unbind(-1)
        losses = -F.logsigmoid(chosen - rejected - self.gamma)
        return scores_of_pairs(losses, rewards, log_probs.means, log_probs.targets.weights)
