"""Causal language modelling: predict the next token.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from neox.model import NetworkOutput


def network_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tokens [B, S] and, if the batch has them, lengths [B] and the starts of tokens' documents [B, S]."""
    return {name: batch[name] for name in ("tokens", "lengths", "document_starts") if name in batch}


@dataclass(frozen=True)
class CausalLM:
    """Weighted sum of the cross entropies of the next tokens.

    A batch holds `tokens` [B, S], `labels` [B, S] (the next tokens), their `loss_mask` or weights [B, S]; `lengths`
    [B] if experts must not count padding; and `document_starts` [B, S] if attention must not cross documents.

    Attributes:
        z_coefficient: Factor of the z-loss; 0 for none.
    """

    z_coefficient: float = 0.0

    label_mask = "loss_mask"
    per_token = ("lm_loss",)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the scores. With a z-loss, the sum of both losses comes first."""
        if not self.z_coefficient:
            return ("lm_loss",)
        return ("loss", "lm_loss", "z_loss")

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the network's inputs."""
        return network_inputs(batch)

    def targets(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return labels and their weights, [B, S] each."""
        return batch["labels"], batch["loss_mask"]

    def scores(self, output: NetworkOutput, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the weighted sum of the labels' cross entropies in fp32, [1]; with a z-loss all its parts, [3]."""
        labels, weights = targets
        if not self.z_coefficient:
            return output.head.cross_entropy(output.hidden, labels, weights).unsqueeze(0)
        parts = output.head.loss_parts(output.hidden, labels, weights, z_coefficient=self.z_coefficient)
        return torch.stack(parts)
