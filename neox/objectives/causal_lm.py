"""Causal language modelling: predict the next token.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from neox.model import LMHead
from neox.ops import linear_cross_entropy
from neox.parallel import ParallelGrid, vocab_parallel_cross_entropy

_LARGEST_LOSS = 20.0
"""Perplexities are limited to e^20, so that an untrained network's do not overflow."""


@dataclass(frozen=True)
class CausalLM:
    """Mean cross entropy of the next token over unmasked positions.

    A batch holds `tokens` [B, S], `labels` [B, S] (the next tokens), `loss_mask` [B, S], and `document_starts` [B, S]
    where attention must not cross documents.
    """

    grid: ParallelGrid

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tokens [B, S], and where each token's document starts in its row [B, S], if the batch says so."""
        return {name: batch[name] for name in ("tokens", "document_starts") if name in batch}

    def targets(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return labels and loss mask, [B, S] each."""
        return batch["labels"], batch["loss_mask"]

    def loss(self, hidden: Tensor, head: LMHead, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross entropy of unmasked tokens in fp32; 0 if all are masked.

        On one tensor rank the head and the loss are computed in chunks of tokens, so that the logits [B, S, V] are
        never in memory at once.
        """
        labels, mask = targets[0], targets[1].float()
        count = mask.sum().clamp(min=1.0)
        if self.grid.tp_size == 1 and head.weight is not None:
            weights = (mask / count).reshape(-1)
            return linear_cross_entropy(hidden.flatten(0, 1), head.weight, labels.reshape(-1), weights)
        losses = vocab_parallel_cross_entropy(head.logits(hidden), labels, self.grid)
        return (losses * mask).sum() / count

    def metrics(self, loss: float) -> dict[str, float]:
        """Return the loss in nats per token and the perplexity, under gpt-neox's names."""
        return {"lm_loss": loss, "lm_loss_ppl": math.exp(min(_LARGEST_LOSS, loss))}
