"""Causal language modelling: predict the next token.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from neox.model import LMHead

_LARGEST_LOSS = 20.0
"""Perplexities are limited to e^20, so that an untrained network's do not overflow."""


@dataclass(frozen=True)
class CausalLM:
    """Mean cross entropy of the next token over unmasked positions.

    A batch holds `tokens` [B, S], `labels` [B, S] (the next tokens), `loss_mask` [B, S], and `document_starts` [B, S]
    where attention must not cross documents.
    """

    score_count = 1

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tokens [B, S], and where each token's document starts in its row [B, S], if the batch says so."""
        return {name: batch[name] for name in ("tokens", "document_starts") if name in batch}

    def targets(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return labels and loss mask, [B, S] each."""
        return batch["labels"], batch["loss_mask"]

    def loss(self, hidden: Tensor, head: LMHead, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross entropy of unmasked tokens in fp32; 0 if all are masked."""
        labels, mask = targets[0], targets[1].float()
        return head.cross_entropy(hidden, labels, mask / mask.sum().clamp(min=1.0))

    def scores(self, hidden: Tensor, head: LMHead, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the loss, [1]."""
        return self.loss(hidden, head, targets).unsqueeze(0)

    def metrics(self, scores: Sequence[float]) -> dict[str, float]:
        """Return the loss in nats per token and the perplexity, under gpt-neox's names."""
        return {"lm_loss": scores[0], "lm_loss_ppl": perplexity(scores[0])}


def perplexity(loss: float) -> float:
    """Return e^loss of a mean loss in nats, of e^20 at most."""
    return math.exp(min(_LARGEST_LOSS, loss))
