"""Section of distillation: training on a teacher's predictions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith
from neox.config.sections.numbers import PositiveFloat, PositiveInt
from neox.config.sections.preferences import OF_PREFERENCES

_WITH_TEACHER = OnlyWith("teacher_logits")


class DistillationConfig(Section):
    """Training on a teacher's predictions (docs/preferences.md)."""

    teacher_logits: Annotated[
        str | None,
        Excludes("train_impl", OF_PREFERENCES, reason="its loss is of whole answers"),
        Excludes("objective", ("masked_lm",), reason="a teacher predicts next tokens"),
        Excludes("lm_z_loss", reason="the loss is another one"),
        Excludes("soft_prompt_tuning.enabled", reason="the teacher has not seen the prompt"),
        Excludes("data_stages", reason="the logits are of samples in one order"),
    ] = None
    """Directory of a teacher's largest logits for the samples of this run, which tools/teacher_logits.py writes. Next
    tokens are then predicted as the teacher predicts them. Logits of other samples, or of a teacher with another
    vocabulary, are refused."""

    distillation_top_k: Annotated[PositiveInt, _WITH_TEACHER] = 32
    """Number of the teacher's largest logits of each token that are learned. tools/teacher_logits.py stores so many; a
    directory with fewer is refused, and of one with more the largest are read."""

    distillation_divergence: Annotated[Literal["forward", "reverse"], _WITH_TEACHER] = "forward"
    """Direction of the divergence: `forward` from the teacher (arXiv:1503.02531), which covers what it finds likely, or
    `reverse` (arXiv:2306.08543), which keeps to what it finds likely."""

    distillation_temperature: Annotated[PositiveFloat, _WITH_TEACHER] = 1.0
    """Divisor of the logits of teacher and model. The divergence is multiplied by its square."""

    distillation_weight: Annotated[float, _WITH_TEACHER] = Field(1.0, gt=0, le=1)
    """Share of the divergence in the loss; the rest is the cross entropy of the next tokens."""

    @property
    def logits_of_token(self) -> int:
        """Number of a teacher's logits for each token; 0 without a teacher."""
        if self.teacher_logits is None:
            return 0
        return self.distillation_top_k

    @property
    def tempers_all_logits(self) -> bool:
        """Whether the loss divides the logits of all tokens by a temperature."""
        is_forward = self.distillation_divergence == "forward"
        return self.teacher_logits is not None and is_forward and self.distillation_temperature != 1.0
