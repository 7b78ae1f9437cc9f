"""Distillation: next tokens are predicted as a teacher predicts them (arXiv:1503.02531).

    loss = w t^2 KL + (1 - w) cross entropy        KL of `neox.model.distillation`, t temperature, w weight

Legend: B batch, S sequence, K logits of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from neox.model import Direction, NetworkOutput, TeacherLogits
from neox.objectives.causal_lm import CausalLM


@dataclass(frozen=True)
class Distilled(CausalLM):
    """Weighted sum over tokens of the divergence from the teacher, and of their cross entropy.

    Batches hold those of `CausalLM`, and `teacher_ids` and `teacher_logits` [B, S, K].

    Attributes:
        direction: Direction of the divergence.
        temperature: Temperature of both distributions.
        weight: Share of the divergence in the loss.
    """

    direction: Direction = "forward"
    temperature: float = 1.0
    weight: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("loss", "kl", "lm_loss")

    def targets(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return labels and weights [B, S], and the teacher's tokens and logits [B, S, K]."""
        return (*super().targets(batch), batch["teacher_ids"], batch["teacher_logits"])

    def scores(self, output: NetworkOutput, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the loss, the divergence with its factor t^2, and the cross entropy in fp32, [3]."""
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
        return torch.cat((trained.unsqueeze(0), parts))
