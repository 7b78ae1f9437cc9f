"""Direct preference optimization (DPO, arXiv:2305.18290), and its variants.

    margin  m = (log p(chosen) - log ref(chosen)) - (log p(rejected) - log ref(rejected))
    sigmoid     -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)       e: label smoothing (cDPO)
    hinge       max(0, 1 - beta m)                                          SLiC, arXiv:2305.10425

log p is the sum over the tokens of an answer. Without a reference log ref is 0. IPO is in `ipo.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.objectives.preferences import AnswerLogProbs, PreferenceObjective, paired_scores


@dataclass(frozen=True, kw_only=True)
class AgainstReference(PreferenceObjective):
    """Preference loss that may compare the model with a reference model.

    Attributes:
        beta: Strength of the constraint to the reference, and factor of the reported rewards.
        with_reference: Whether batches hold `reference` [B, 2 P].
    """

    beta: float
    with_reference: bool = True

    @property
    def extra_fields(self) -> Sequence[str]:
        """The reference's log-probabilities, if there is a reference."""
        return ("reference",) if self.with_reference else ()


@dataclass(frozen=True, kw_only=True)
class DPO(AgainstReference):
    """Mean over pairs of a loss of the margin.

    Attributes:
        kind: Loss of a margin.
        label_smoothing: Assumed probability that the labels of a pair are swapped, for `sigmoid`.
    """

    kind: Literal["sigmoid", "hinge"] = "sigmoid"
    label_smoothing: float = 0.0

    def pair_scores(self, found: AnswerLogProbs) -> list[Tensor]:
        """Return the scores of pairs."""
        ratios = log_ratios(found)
        chosen, rejected = ratios.unbind(-1)
        margins = self.beta * (chosen - rejected)
        if self.kind == "hinge":
            losses = torch.relu(1 - margins)
        else:
            losses = -F.logsigmoid(margins) * (1 - self.label_smoothing)
            losses = losses - F.logsigmoid(-margins) * self.label_smoothing
        return paired_scores(losses, self.beta * ratios, found.sums, found.targets.weights)


def log_ratios(found: AnswerLogProbs) -> Tensor:
    """Return log p(answer) - log ref(answer) of the documents of pairs [B, P, 2]; log ref is 0 without a reference."""
    reference = found.targets.extra
    if reference is None:
        return found.sums
    return found.sums - reference.view(found.sums.shape)
