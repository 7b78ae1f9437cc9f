"""Causal language modelling: predict the next token.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from neox.model import NetworkOutput
from neox.objectives.scores import Reduction, pack_scores


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
    reductions: ClassVar[Mapping[str, Reduction]] = MappingProxyType({})

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
        """Return the weighted sum of the labels' cross entropies, with a z-loss also both parts, as packed scores."""
        labels, weights = targets
        count = weights.sum()
        if not self.z_coefficient:
            loss = output.head.cross_entropy(output.hidden, labels, weights)
            return pack_scores(loss, [(loss, count)])
        parts = output.head.loss_parts(output.hidden, labels, weights, z_coefficient=self.z_coefficient)
        return pack_scores(parts.trained, [(part, count) for part in parts])
