"""Masked language modelling with pairs of sentences (BERT, arXiv:1810.04805).

Legend: B batch, S sequence, P predicted tokens of a sample, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.data.masked_batch import MaskedLMBatch
from neox.model import LMHead
from neox.objectives.causal_lm import perplexity


@dataclass(frozen=True)
class MaskedLM:
    """Mean cross entropy of masked tokens, plus that of whether sentences follow each other.

    A batch holds what `MaskedLMBatch` names. Masked tokens alone go through the head.

    Attributes:
        sentences: Whether the network has a sentence head.
    """

    sentences: bool

    @property
    def score_count(self) -> int:
        """Length of `scores`."""
        return 4 if self.sentences else 2

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tokens and token types [B, S], and lengths without padding [B]."""
        return {name: batch[name] for name in ("tokens", "token_types", "lengths")}

    def targets(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return masked positions, ids and weights [B, P], and the sentences' labels [B]."""
        given = MaskedLMBatch(**batch)
        return given.masked_positions, given.masked_ids, given.masked_weights, given.next_sentence

    def loss(self, hidden: Tensor, head: LMHead, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of both mean losses in fp32; masked tokens count 0 where a batch has none."""
        masked, sentences = self._losses(hidden, head, targets)
        return masked if sentences is None else masked + sentences[0]

    def scores(self, hidden: Tensor, head: LMHead, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the loss, that of masked tokens and, with a sentence head, that of sentences and their accuracy."""
        masked, sentences = self._losses(hidden, head, targets)
        if sentences is None:
            return torch.stack((masked, masked))
        loss, logits = sentences
        return torch.stack((masked + loss, masked, loss, (logits.argmax(-1) == targets[3]).float().mean()))

    def metrics(self, scores: Sequence[float]) -> dict[str, float]:
        """Return the masked tokens' loss in nats and perplexity, and the sentences' loss and accuracy."""
        names = ("lm_loss", "sentence_loss", "sentence_accuracy")
        return {"lm_loss_ppl": perplexity(scores[1]), **dict(zip(names, scores[1:], strict=False))}

    def _losses(
        self, hidden: Tensor, head: LMHead, targets: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return the mean loss of masked tokens; the sentences' mean loss and logits [B, 2], or None."""
        positions, ids, weights, follows = targets
        picked = hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))  # [B, P, H]
        masked = head.cross_entropy(picked, ids, weights / weights.sum().clamp(min=1.0))
        if head.sentences is None:
            return masked, None
        logits = head.sentences(hidden).float()
        return masked, (F.cross_entropy(logits, follows), logits)
