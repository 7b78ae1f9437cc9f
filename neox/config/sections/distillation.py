"""Configuration section of knowledge distillation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith
from neox.config.sections.numbers import PositiveFloat, PositiveInt
from neox.config.sections.preferences import OF_PREFERENCES

_WITH_TEACHER = OnlyWith("teacher_logits")


class DistillationConfig(Section):
    """Knowledge distillation from a teacher's logits (docs/preferences.md)."""

    teacher_logits: Annotated[
        str | None,
        Excludes("train_impl", OF_PREFERENCES, reason="its loss compares whole answers"),
        Excludes("objective", ("masked_lm",), reason="a teacher predicts next tokens"),
        Excludes("lm_z_loss", reason="the distillation loss has no z-loss"),
        Excludes("soft_prompt_tuning.enabled", reason="the teacher does not see the soft prompt"),
        Excludes("data_stages", reason="the logits are stored for one order of the samples"),
    ] = None
    """Directory with a teacher's largest logits for the samples of this run, written by tools/teacher_logits.py. The
    model then learns the teacher's distribution of next tokens. Logits of other samples, or of a teacher with another
    vocabulary, are refused."""

    distillation_top_k: Annotated[PositiveInt, _WITH_TEACHER] = 32
    """Number of the teacher's largest logits per token that enter the loss. tools/teacher_logits.py stores this many. A
    directory with fewer is refused; if it holds more, only the largest are read."""

    distillation_divergence: Annotated[Literal["forward", "reverse"], _WITH_TEACHER] = "forward"
    """Direction of the KL divergence. `forward`, KL(teacher || model) (arXiv:1503.02531), covers everything that the
    teacher finds likely. `reverse`, KL(model || teacher) (arXiv:2306.08543), concentrates on what it finds most
    likely."""

    distillation_temperature: Annotated[PositiveFloat, _WITH_TEACHER] = 1.0
    """Temperature that divides the logits of teacher and model. The divergence is multiplied by its square."""

    distillation_weight: Annotated[float, _WITH_TEACHER] = Field(1.0, gt=0, le=1)
    """Weight of the divergence in the loss. The cross entropy of the next tokens has the weight 1 minus this."""

    @property
    def logits_of_token(self) -> int:
        """Number of the teacher's logits per token; 0 without a teacher."""
        if self.teacher_logits is None:
            return 0
        return self.distillation_top_k

    @property
    def tempers_all_logits(self) -> bool:
        """Whether the loss divides the logits of all tokens by a temperature."""
        is_forward = self.distillation_divergence == "forward"
        return self.teacher_logits is not None and is_forward and self.distillation_temperature != 1.0
