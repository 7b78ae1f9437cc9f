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

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from neox.objectives.dpo import log_ratios
from neox.objectives.preferences import AnswerLogProbs, PreferenceObjective, sums_over_pairs
from neox.objectives.scores import LinearCombination, Reduction, Row
from neox.parallel import ParallelGrid


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
    reductions: ClassVar[Mapping[str, Reduction]] = MappingProxyType(
        {"rewards/margins": LinearCombination({"rewards/chosen": 1.0, "rewards/rejected": -1.0})}
    )

    beta: float
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @property
    def optional_targets(self) -> tuple[str, ...]:
        """The reference's log-probabilities, and which answers are good."""
        return ("reference", "desirable")

    def pair_scores(self, log_probs: AnswerLogProbs) -> dict[str, Row]:
        """Return the rows of judged answers: sums over the good ones, and over the bad ones.

        z is one number of a micro batch of all data ranks, and is reported as the mean of these numbers.
        """
        targets = log_probs.targets
        assert targets.desirable is not None
        weights = targets.weights  # [B, P]
        good = targets.desirable.float()
        own, mismatched = log_ratios(log_probs).unbind(-1)

        kl, has_kl = _kl_of_micro_batch(mismatched.detach(), weights > 0, log_probs.grid)
        losses_of_good = self.desirable_weight * (1 - torch.sigmoid(self.beta * (own - kl)))
        losses_of_bad = self.undesirable_weight * (1 - torch.sigmoid(self.beta * (kl - own)))
        losses = torch.where(good > 0, losses_of_good, losses_of_bad)

        reported = {"rewards": self.beta * own, "logps": log_probs.sums[..., 0]}
        of_good = sums_over_pairs(reported, weights * good)
        of_bad = sums_over_pairs(reported, weights * (1 - good))
        return {
            "loss": ((weights * losses).sum(), weights.sum()),
            "rewards/chosen": of_good["rewards"],
            "rewards/rejected": of_bad["rewards"],
            "logps/chosen": of_good["logps"],
            "logps/rejected": of_bad["logps"],
            "kl": (kl, has_kl),
        }


def _kl_of_micro_batch(ratios: Tensor, exists: Tensor, grid: ParallelGrid) -> tuple[Tensor, Tensor]:
    """Return z, the mean of mismatched answers over the micro batches of all data ranks, at least 0.

    Args:
        ratios: Log-ratios of mismatched answers [B, P].
        exists: Which of them there are [B, P].
        grid: Process groups.

    Returns:
        z, 0 if no rank has an answer; and 1, or 0 in that case.
    """
    totals = torch.stack((ratios.masked_fill(~exists, 0.0).sum(), exists.sum()))
    if grid.dp_size > 1:
        dist.all_reduce(totals, group=grid.dp_group)
    total, count = totals
    return (total / count.clamp(min=1)).clamp(min=0), count.clamp(max=1)
