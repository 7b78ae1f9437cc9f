"""Knowledge distillation: the model learns a teacher's distribution of next tokens (arXiv:1503.02531).

    loss = w t^2 KL + (1 - w) cross entropy        KL as in `neox.model.distillation`, t temperature, w weight

Legend: B batch, S sequence, K logits of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from neox.model import Direction, NetworkOutput, TeacherLogits
from neox.objectives.causal_lm import CausalLM
from neox.objectives.scores import pack_scores


@dataclass(frozen=True)
class Distilled(CausalLM):
    """Weighted sum of the KL divergence from the teacher and the cross entropy.

    Batches have the fields of `CausalLM`, and `teacher_ids` and `teacher_logits` [B, S, K].

    Attributes:
        direction: Direction of the divergence.
        temperature: Temperature of both distributions.
        weight: Weight w of the divergence.
    """

    direction: Direction = "forward"
    temperature: float = 1.0
    weight: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("loss", "kl", "lm_loss")

    def targets(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return labels and weights [B, S], and the teacher's token ids and logits [B, S, K]."""
        return (*super().targets(batch), batch["teacher_ids"], batch["teacher_logits"])

    def scores(self, output: NetworkOutput, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the loss, t^2 times the divergence, and the cross entropy as packed scores."""
        labels, weights, ids, logits = targets
        trained, parts = output.head.distillation(
            output.hidden,
            labels,
            weights,
            TeacherLogits(ids, logits),
            direction=self.direction,
            temperature=self.temperature,
            share=self.weight,
        )
        count = weights.sum()
        divergence, cross_entropy = parts
        return pack_scores(trained, [(trained, count), (divergence, count), (cross_entropy, count)])
