"""Kahneman-Tversky optimization (KTO, arXiv:2402.01306, equation 7), of answers that are judged one by one.

    r(answer)  = log p(answer) - log ref(answer)
    z          = max(0, mean over the micro batch of all data ranks of r(prompt with another prompt's answer))
    loss       = w_desirable   (1 - sigmoid(beta (r - z)))      for a good answer
                 w_undesirable (1 - sigmoid(beta (z - r)))      for a bad one

No gradient flows through z, which estimates the KL divergence from the reference. The mismatched answers for z are in
the same rows as the others, so every parallel layout computes both in one pass. They take part in the backward pass of
the blocks with a gradient of 0, but not in that of the head. A separate forward pass would need a second pipeline
schedule in each step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from neox.objectives.data_ranks import mean_over_data_ranks
from neox.objectives.dpo import log_ratios
from neox.objectives.preferences import AnswerLogProbs, PreferenceObjective


@dataclass(frozen=True)
class KTO(PreferenceObjective):
    """Weighted sum over answers of the losses of good and bad ones.

    A pair of a row holds a prompt with its own answer, and the same prompt with another prompt's answer, for z.

    Attributes:
        beta: How strongly the model is held to the reference.
        desirable_weight: Weight of the losses of good answers.
        undesirable_weight: Weight of the losses of bad answers.
    """

    names = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl")

    beta: float
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @property
    def optional_targets(self) -> tuple[str, ...]:
        """The reference's log-probabilities, and which answers are good."""
        return ("reference", "desirable")

    def pair_scores(self, log_probs: AnswerLogProbs) -> dict[str, Tensor]:
        """Return the scores of judged answers.

        Rewards and log-probabilities are means over the good or the bad answers of the micro batch of all data ranks;
        0 if it has none.
        """
        targets = log_probs.targets
        assert targets.desirable is not None
        exists = (targets.weights > 0).float()  # [B, P]
        good = targets.desirable.float()
        own, mismatched = log_ratios(log_probs).unbind(-1)

        kl = mean_over_data_ranks(mismatched.detach(), exists, log_probs.grid).clamp(min=0)
        losses_of_good = self.desirable_weight * (1 - torch.sigmoid(self.beta * (own - kl)))
        losses_of_bad = self.undesirable_weight * (1 - torch.sigmoid(self.beta * (kl - own)))
        losses = torch.where(good > 0, losses_of_good, losses_of_bad)

        rewards = self.beta * own.detach()
        sums = log_probs.sums[..., 0].detach()
        chosen = mean_over_data_ranks(rewards, exists * good, log_probs.grid)
        rejected = mean_over_data_ranks(rewards, exists * (1 - good), log_probs.grid)
        return {
            "loss": (targets.weights * losses).sum(),
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "logps/chosen": mean_over_data_ranks(sums, exists * good, log_probs.grid),
            "logps/rejected": mean_over_data_ranks(sums, exists * (1 - good), log_probs.grid),
            "kl": kl,
        }
