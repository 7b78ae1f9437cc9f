"""`Objective`: the interface between batches, both engines (plain and pipeline) and the network's last layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from neox.config import RunPlan
from neox.model import LMHead
from neox.objectives.causal_lm import CausalLM
from neox.objectives.masked_lm import MaskedLM

Batch = Mapping[str, Tensor]
"""One micro batch of a data rank by name; each objective says which names it reads."""


class Objective(Protocol):
    """What a network is trained to do.

    The first pipeline stage reads `inputs`, the last one computes `loss` from the hidden states and `targets`; without
    stages one rank does both. Values are means over a micro batch; engines average over micro batches and data ranks.
    """

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the arguments of `GPT.hidden`: integers, floating-point tensors would get gradients between stages."""
        ...

    def targets(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return what the loss needs beside the hidden states."""
        ...

    def loss(self, hidden: Tensor, head: LMHead, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of a micro batch, equal on all tensor ranks.

        Args:
            hidden: Hidden states after the final norm [B, S, H].
            head: The network's head.
            targets: Result of `targets`, on the device.

        Returns:
            A scalar in fp32.
        """
        ...

    @property
    def score_count(self) -> int:
        """Length of `scores`."""
        ...

    def scores(self, hidden: Tensor, head: LMHead, targets: tuple[Tensor, ...]) -> Tensor:
        """Return what an evaluation averages, [K] in fp32: the loss first. Arguments as those of `loss`."""
        ...

    def metrics(self, scores: Sequence[float]) -> dict[str, float]:
        """Return what an evaluation reports for mean scores, by name."""
        ...


def build_objective(plan: RunPlan) -> Objective:
    """Return the objective of a run: masked language modelling for a bidirectional network, else causal."""
    network = plan.architecture
    return MaskedLM(network.sentence_head) if network.bidirectional else CausalLM()
