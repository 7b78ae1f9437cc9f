"""Configuration section of failures and recovery."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from neox.config.sections.conditions import Excludes, OnlyWith, OnlyWithAny, Requires
from neox.features.loss_spikes.keys import LossSpikeKeys
from neox.features.replica_check.keys import ReplicaCheckKeys


class HealingConfig(LossSpikeKeys, ReplicaCheckKeys):
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

    preemption_command: str | None = None
    """Shell command that each host runs periodically. Exit status 0 means that the host is about to be preempted, as
    with `curl -fs http://169.254.169.254/latest/meta-data/spot/instance-action`. All ranks then save and exit, as after
    SIGTERM. A command that runs for more than ten seconds is killed and counts as no notice."""

    preemption_file: str | None = None
    """File whose appearance on a host means that the host is about to be preempted. All ranks then save and exit."""

    preemption_seconds: Annotated[float, OnlyWithAny(("preemption_command", "preemption_file"))] = Field(
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
