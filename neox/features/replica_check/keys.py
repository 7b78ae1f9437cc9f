"""Key of the comparison of weights of data ranks."""

from __future__ import annotations

from typing import Annotated

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes
from neox.config.sections.numbers import PositiveInt


class ReplicaCheckKeys(Section):
    """Key of the comparison of weights of data ranks."""

    check_replicas_every: Annotated[
        PositiveInt | None,
        Excludes("zero_optimization.stage", (3,), reason="no two ranks hold the same weights"),
        Excludes("expert_model_parallel_size", above=1, reason="data ranks hold different experts"),
    ] = None
    """Number of steps between comparisons of the weights of data ranks by checksum. The check runs before the update,
    and also before each checkpoint. If a rank differs from the majority, the run ends with an error that names the
    rank, and restarts leave out its host. This detects silent data corruption: bits flipped by faulty memory, links or
    processors."""
