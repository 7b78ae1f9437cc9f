"""Simple preference optimization with a reference-free reward (SimPO, arXiv:2405.14734).

r(answer) = beta mean over its tokens of log p
loss      = -log sigmoid(r(chosen) - r(rejected) - gamma)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from neox.objectives.preferences import AnswerLogProbs, PreferenceObjective, paired_scores


@dataclass(frozen=True)
class SimPO(PreferenceObjective):
    """Mean over pairs of the loss of the margin between mean log-probabilities.

    Attributes:
        beta: Factor of the mean log-probabilities.
        gamma: Margin by which the preferred answer is to be better.
    """

    beta: float
    gamma: float

    def pair_scores(self, found: AnswerLogProbs) -> list[Tensor]:
        """Return the scores of pairs. As in TRL, the reported log-probabilities are means over tokens."""
        rewards = self.beta * found.means
        chosen, rejected = rewards.unbind(-1)
        losses = -F.logsigmoid(chosen - rejected - self.gamma)
        return paired_scores(losses, rewards, found.means, found.targets.weights)
