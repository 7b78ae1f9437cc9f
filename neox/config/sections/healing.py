"""Configuration section of failures and recovery."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith, Requires
from neox.config.sections.numbers import NonNegativeInt, PositiveFloat, PositiveInt
from neox.config.sections.preferences import OF_PREFERENCES

_WITH_SPIKES = OnlyWith("loss_spike_action", ("warn", "rollback"))


class HealingConfig(Section):
    """Recovery from failures: restarts, hosts, loss spikes, silent data corruption, preemption."""

    max_restarts: Annotated[
        int,
        Requires("save", advice="give the directory of the checkpoints from which a run is restarted"),
        Excludes("no_save_optim", reason="a restart loads the optimizer too"),
        Excludes(
            "launcher",
            ("none",),
            reason="it prints commands, and nothing is left that could restart the run",
            advice="use another launcher",
        ),
    ] = Field(0, ge=0, le=10**6)
    """Maximum number of times that the launcher restarts a failed training from its newest complete checkpoint. A
    failure that a restart cannot fix ends the run at once. 0 disables restarts."""

    elastic: Annotated[
        bool,
        OnlyWith("launcher", ("pdsh",)),
        Excludes("no_ssh_check", reason="the hosts are checked before each start"),
    ] = False
    """Start with fewer hosts if some are unusable and no spare host is left. The remaining data ranks keep the batch
    size by more gradient accumulation. The next start checks all hosts again, and uses those that have come back."""

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

    check_replicas_every: Annotated[
        PositiveInt | None,
        Excludes("zero_optimization.stage", (3,), reason="no two ranks hold the same weights"),
        Excludes("expert_model_parallel_size", above=1, reason="data ranks hold different experts"),
    ] = None
    """Number of steps between comparisons of the weights of data ranks by checksum. The check runs before the update,
    and also before each checkpoint. If a rank differs from the majority, the run ends with an error that names the
    rank, and restarts leave out its host. This detects silent data corruption: bits flipped by faulty memory, links or
    processors."""

    preemption_command: str | None = None
    """Shell command that each host runs periodically. Exit status 0 means that the host is about to be preempted, as
    with `curl -fs http://169.254.169.254/latest/meta-data/spot/instance-action`. All ranks then save and exit, as after
    SIGTERM. A command that runs for more than ten seconds is killed and counts as no notice."""

    preemption_file: str | None = None
    """File whose appearance on a host means that the host is about to be preempted. All ranks then save and exit."""

    preemption_seconds: Annotated[float, OnlyWith("preemption_command"), OnlyWith("preemption_file")] = Field(
        5.0, gt=0, le=3600
    )
    """Seconds between two checks for a preemption notice."""

    @field_validator("preemption_command", "preemption_file")
    @classmethod
    def _not_empty(cls, value: str | None) -> str | None:
        """Refuse empty text: an empty command succeeds, and an empty path exists, so each host would get a notice."""
        if value is not None and not value.strip():
            raise PydanticCustomError("empty", "is empty; remove it, or name a source of notices")
        return value
