"""Keys of loss spikes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith, Requires
from neox.config.sections.numbers import NonNegativeInt, PositiveFloat
from neox.config.sections.preferences import OF_PREFERENCES

_WITH_SPIKES = OnlyWith("loss_spike_action", ("warn", "rollback"))


class LossSpikeKeys(Section):
    """Keys of loss spikes."""

    loss_spike_action: Annotated[
        Literal["off", "warn", "rollback"],
        Requires("save", when=("rollback",), advice="give the directory of the checkpoints to roll back to"),
        Excludes("no_save_optim", when=("rollback",), reason="the optimizer is rolled back too"),
        Excludes("objective", ("masked_lm",), when=("rollback",), reason="its samples cannot be skipped"),
        Excludes("train_impl", OF_PREFERENCES, when=("rollback",), reason="its samples cannot be skipped"),
        Excludes(
            "pack_impl",
            ("best_fit", "pack_until_overflow", "unpacked"),
            when=("rollback",),
            reason="samples with padding cannot be skipped",
            advice="use packed, or warn",
        ),
        Excludes(
            "teacher_logits",
            when=("rollback",),
            reason="they are stored for the samples in order, without gaps",
            advice="use warn",
        ),
    ] = "off"
    """Action if the training loss of a step is far above those of the previous steps. `warn` logs it and records an
    event. `rollback` also loads the newest checkpoint before the step, and skips the batches from there to the step.
    Checkpoints record what was skipped."""

    loss_spike_factor: Annotated[PositiveFloat, _WITH_SPIKES] = 8.0
    """Number of deviations above the median of the previous losses at which a loss counts as a spike. The deviation is
    the median absolute deviation times 1.4826, which estimates a normal distribution's standard deviation. It is at
    least a thousandth of the median."""

    loss_spike_window: Annotated[int, _WITH_SPIKES] = Field(100, ge=8, le=10**6)
    """Number of previous steps that a loss is compared with. No loss counts as a spike before there are this many.
    Checkpoints carry the losses of these steps."""

    loss_spike_max_rollbacks: Annotated[NonNegativeInt, OnlyWith("loss_spike_action", ("rollback",))] = 3
    """Maximum number of rollbacks of a run, over all its restarts. Further spikes are only reported."""
