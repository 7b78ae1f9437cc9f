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
    """Mean cross entropy of the next token over unmasked positions.

    A batch holds `tokens` [B, S], `labels` [B, S] (the next tokens), `loss_mask` [B, S], and `document_starts` [B, S]
    where attention must not cross documents.
    """

    names = ("lm_loss",)
    per_token = ("lm_loss",)

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tokens [B, S], and where each token's document starts in its row [B, S], if the batch says so."""
        return {name: batch[name] for name in ("tokens", "document_starts") if name in batch}

    def targets(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return labels and loss mask, [B, S] each."""
        return batch["labels"], batch["loss_mask"]

    def scores(self, output: NetworkOutput, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross entropy of unmasked tokens in fp32, [1]; 0 if all are masked."""
        labels, loss_mask = targets
        mask = loss_mask.float()
        weights = mask / mask.sum().clamp(min=1.0)
        return output.head.cross_entropy(output.hidden, labels, weights).unsqueeze(0)
