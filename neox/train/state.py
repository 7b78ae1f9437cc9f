"""Where a run is: what changes while a plan does not."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TrainState:
    """Progress of one process's run.

    iteration: completed steps from 1, over resumes. skipped, nonfinite: steps of this process that left the weights
    alone, and those among them that the non-finite rule counted. losses: the last training loss and evaluations.
    """

    iteration: int = 0
    skipped: int = 0
    nonfinite: int = 0
    losses: dict[str, float] = field(default_factory=dict)
