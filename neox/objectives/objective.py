"""`Objective`: the interface between batches, both engines (plain and pipeline) and the network's last layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from neox.model import LMHead
from neox.objectives.causal_lm import CausalLM
from neox.objectives.masked_lm import MaskedLM
from neox.plan import RunPlan

Batch = Mapping[str, Tensor]
"""One micro batch of a data rank by name; each objective says which names it reads."""


class Objective(Protocol):
    """What a network is trained to do.

    The first pipeline stage reads `inputs`, the last one computes `scores` from the hidden states and `targets`;
    without stages one rank does both. Values are means over a micro batch; engines average over micro batches and data
    ranks.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each score, as steps and evaluations report it; `lm_loss` is in nats per token."""
        ...

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the arguments of `GPT.hidden`: integers, floating-point tensors would get gradients between stages."""
        ...

    def targets(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return what the scores need beside the hidden states."""
        ...

    def scores(self, hidden: Tensor, head: LMHead, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the scores of a micro batch, equal on all tensor ranks: first the loss that is trained.

        Args:
            hidden: Hidden states after the final norm [B, S, H].
            head: The network's head.
            targets: Result of `targets`, on the device.

        Returns:
            One number for each of `names`, in fp32.
        """
        ...


def build_objective(plan: RunPlan) -> Objective:
    """Return the objective of a run: masked language modelling for a bidirectional network, else causal."""
    network = plan.architecture
    return MaskedLM(network.sentence_head) if network.bidirectional else CausalLM()
