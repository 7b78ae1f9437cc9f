"""Section of what a run does about its failures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith, Requires
from neox.config.sections.numbers import NonNegativeInt, PositiveFloat, PositiveInt
from neox.config.sections.preferences import OF_PREFERENCES

_WITH_SPIKES = OnlyWith("loss_spike_action", ("warn", "rollback"))


class HealingConfig(Section):
    """Failures of a training run: restarts, hosts, and losses that go wrong, silent errors, preemption."""

    max_restarts: Annotated[
        int, Requires("save", advice="give the directory of the checkpoints from which a run is started again")
    ] = Field(0, ge=0, le=10**6)
    """Number of times that the launcher starts a failed training again, from its newest complete checkpoint. A failure
    that a restart cannot help ends the run all the same. 0 starts nothing again."""

    elastic: Annotated[
        bool,
        OnlyWith("launcher", ("pdsh",)),
        Excludes("no_ssh_check", reason="the hosts are asked before each start"),
    ] = False
    """Start with fewer hosts if some cannot take part and no spare host is left. Fewer data ranks then share the same
    batch by accumulation. The next start asks all hosts again, and uses those that have come back."""

    loss_spike_action: Annotated[
        Literal["off", "warn", "rollback"],
        Requires("save", when=("rollback",), advice="give the directory of the checkpoints to go back to"),
        Excludes("no_save_optim", when=("rollback",), reason="the optimizer goes back too"),
        Excludes("objective", ("masked_lm",), when=("rollback",), reason="its samples cannot be skipped"),
        Excludes("train_impl", OF_PREFERENCES, when=("rollback",), reason="its samples cannot be skipped"),
    ] = "off"
    """What follows if the trained loss of a step is far above those of the last steps. `warn`: a line in the log and an
    event. `rollback`: the run also goes back to its newest checkpoint before the step, and skips the batches from there
    to the step. Checkpoints record what was skipped."""

    loss_spike_factor: Annotated[PositiveFloat, _WITH_SPIKES] = 8.0
    """Deviations above the median of the last losses from which a loss is a spike. The deviation is the median distance
    from the median, times 1.4826 (of a normal distribution the standard deviation), at least a thousandth of the
    median."""

    loss_spike_window: Annotated[int, _WITH_SPIKES] = Field(100, ge=8, le=10**6)
    """Number of the last steps whose losses are compared with. No step is judged before there are so many."""

    loss_spike_max_rollbacks: Annotated[NonNegativeInt, OnlyWith("loss_spike_action", ("rollback",))] = 3
    """Number of times that a run goes back, over all its restarts. Further spikes are only reported."""

    check_replicas_every: Annotated[
        PositiveInt | None,
        Excludes("zero_optimization.stage", (3,), reason="no two ranks hold the same weights"),
        Excludes("expert_model_parallel_size", above=1, reason="data ranks hold different experts"),
    ] = None
    """Number of steps after which checksums of the weights are compared between data ranks, before the update, and
    before each checkpoint. A rank that differs from most ends the run with its name, and its host is left out of
    restarts. It finds bits that a memory, a link or a processor has changed in silence."""

    preemption_command: str | None = None
    """Shell command that each host runs again and again, and that ends with status 0 once the host is about to be taken
    away, such as `curl -fs http://169.254.169.254/latest/meta-data/spot/instance-action`. All ranks then save and end,
    as after SIGTERM. A command that takes longer than ten seconds counts as no notice."""

    preemption_file: str | None = None
    """File that appears on a host that is about to be taken away, with the same consequence."""

    preemption_seconds: Annotated[PositiveFloat, OnlyWith("preemption_command"), OnlyWith("preemption_file")] = 5.0
    """Seconds between two looks for such a notice."""
