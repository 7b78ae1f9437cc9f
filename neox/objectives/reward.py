"""Loss of a reward model on pairs of answers (Bradley-Terry; InstructGPT, arXiv:2203.02155, equation 1).

    s(answer) = score of its last token
    loss      = -log sigmoid(s(chosen) - s(rejected)) + c (s(chosen) + s(rejected))^2 + z (s(chosen)^2 + s(rejected)^2)

c (`rm_center_coefficient`, arXiv:2312.09244) is TRL's `center_rewards_coefficient`, and z (`z_loss`) is gpt-neox's.
Both terms keep scores near 0: the first term depends only on differences of scores.

With context ranks each score is computed by the rank that holds the token, and all get the sum.

Legend: B rows, S positions of a row, P maximum number of pairs of a row, D = 2 P documents, H hidden, C context ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.data.answer_pairs.answers import ANSWERS_PER_PAIR
from neox.model import NetworkOutput
from neox.objectives.causal_lm import network_inputs
from neox.objectives.preferences import sums_over_pairs
from neox.objectives.scores import Reduction, pack_scores
from neox.parallel import context_indices, total_of_context_ranks


@dataclass(frozen=True)
class RewardModel:
    """Weighted sum of the losses of pairs.

    A batch has the fields of `neox.data.answer_pairs.pair_rows.PreferenceDataset` for pairs that are scored. Metrics
    have TRL's names; mean, smallest and largest reward are those of all answers of a step. (TRL takes the smallest and
    the largest one of each micro batch, and averages them.)

    Attributes:
        center_coefficient: Factor c of the squared sum of both scores.
        square_coefficient: Factor z of the sum of both squared scores.
    """

    center_coefficient: float = 0.0
    square_coefficient: float = 0.0

    label_mask = "pair_mask"
    per_token: tuple[str, ...] = ()
    names = ("loss", "accuracy", "margin", "mean_reward", "min_reward", "max_reward")
    reductions: ClassVar[Mapping[str, Reduction]] = MappingProxyType({"min_reward": "min", "max_reward": "max"})

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the network's inputs."""
        return network_inputs(batch)

    def targets(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the last position of each document [B, 2 P], and the weights of pairs [B, P]."""
        return batch["ends"], batch["pair_mask"]

    def scores(self, output: NetworkOutput, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the packed scores of a micro batch."""
        ends, weights = targets
        scores = scores_of_documents(output, ends).view(*weights.shape, ANSWERS_PER_PAIR)
        chosen, rejected = scores.unbind(-1)
        losses = -F.logsigmoid(chosen - rejected)
        if self.center_coefficient:
            losses = losses + self.center_coefficient * (chosen + rejected).square()
        if self.square_coefficient:
            losses = losses + self.square_coefficient * (chosen.square() + rejected.square())
        loss = (weights * losses).sum()
        of_pairs = {
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "mean_reward": scores.mean(-1),
        }
        rows = sums_over_pairs(of_pairs, weights)
        is_none = (weights == 0).unsqueeze(-1)
        _, pairs = rows["margin"]
        smallest = scores.masked_fill(is_none, float("inf")).min()
        largest = scores.masked_fill(is_none, float("-inf")).max()
        return pack_scores(loss, [(loss, weights.sum()), *rows.values(), (smallest, pairs), (largest, pairs)])


def scores_of_documents(output: NetworkOutput, ends: Tensor) -> Tensor:
    """Return the scores of documents in fp32, [B, D].

    Args:
        output: Hidden states and head.
        ends: Last position of each document in its row [B, D].
    """
    hidden = output.hidden
    grid = output.head.grid
    is_here = torch.ones_like(ends, dtype=torch.bool)
    if grid.cp_size > 1:
        slots = context_indices(hidden.shape[1] * grid.cp_size, grid, hidden.device)  # [S/C]
        is_end = ends.unsqueeze(-1) == slots  # [B, D, S/C]
        is_here = is_end.any(-1)
        ends = is_end.int().argmax(-1)  # among this rank's tokens; any one if it is elsewhere
    last = hidden.gather(1, ends.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))  # [B, D, H]
    scores = output.head.logits(last).squeeze(-1).float()
    return total_of_context_ranks(scores * is_here, grid)
