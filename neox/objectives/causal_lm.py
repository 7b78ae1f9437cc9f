"""Causal language modelling: predict the next token.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from neox.model import NetworkOutput


@dataclass(frozen=True)
class CausalLM:
    """Weighted sum of the cross entropies of the next tokens.

    A batch holds `tokens` [B, S], `labels` [B, S] (the next tokens), their `loss_mask` or weights [B, S], and
    `document_starts` [B, S] if attention must not cross documents.
    """

    names = ("lm_loss",)
    label_mask = "loss_mask"
    per_token = ("lm_loss",)

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tokens [B, S] and, if the batch has them, the starts of the tokens' documents [B, S]."""
        return {name: batch[name] for name in ("tokens", "document_starts") if name in batch}

    def targets(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return labels and their weights, [B, S] each."""
        return batch["labels"], batch["loss_mask"]

    def scores(self, output: NetworkOutput, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the weighted sum of the labels' cross entropies in fp32, [1]."""
        labels, weights = targets
        return output.head.cross_entropy(output.hidden, labels, weights).unsqueeze(0)
