"""Masked language modelling with pairs of sentences (BERT, arXiv:1810.04805).

Legend: B batch, S sequence, P predicted tokens of a sample, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.data.masked.masked_batch import MaskedLMBatch
from neox.model import NetworkOutput
from neox.objectives.scores import LinearCombination, Reduction, pack_scores


@dataclass(frozen=True)
class MaskedLM:
    """Weighted sum of the cross entropies of masked tokens, plus that of whether sentences follow each other.

    A batch holds what `MaskedLMBatch` names. Only masked tokens go through the head.

    Attributes:
        sentences: Whether the network has a sentence head.
    """

    per_token = ("lm_loss",)
    label_mask = "masked_weights"

    sentences: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the scores. With a sentence head, the sum of both losses comes first."""
        if not self.sentences:
            return ("lm_loss",)
        return ("loss", "lm_loss", "sentence_loss", "sentence_accuracy")

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """The sum of both losses, each of which has a divisor of its own."""
        if not self.sentences:
            return {}
        return {"loss": LinearCombination({"lm_loss": 1.0, "sentence_loss": 1.0})}

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tokens and token types [B, S], and the lengths of samples without padding [B]."""
        return {name: batch[name] for name in ("tokens", "token_types", "lengths")}

    def targets(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return masked positions, ids and weights [B, P], and the sentences' labels [B]."""
        given = MaskedLMBatch(**batch)
        return given.masked_positions, given.masked_ids, given.masked_weights, given.next_sentence

    def scores(self, output: NetworkOutput, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the packed scores of a micro batch. The trained loss of masked tokens is 0 if a batch has none."""
        hidden = output.hidden
        head = output.head
        positions, ids, weights, follows = targets
        picked = hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))  # [B, P, H]
        masked = head.cross_entropy(picked, ids, weights)
        if head.sentences is None:
            return pack_scores(masked, [(masked, weights.sum())])
        logits = head.sentences(hidden).float()  # [B, 2]
        losses = F.cross_entropy(logits, follows, reduction="sum")
        correct = (logits.argmax(-1) == follows).sum()
        pairs = torch.full_like(losses, len(follows))
        rows = [(masked, weights.sum()), (losses, pairs), (correct, pairs)]
        return pack_scores(masked + losses / len(follows), rows)
