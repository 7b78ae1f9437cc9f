"""Hosts that compute more slowly than the others, which all of them wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean, median, median_low
from typing import NamedTuple

from neox.engine import Engine, Feature, RunStart, StepResult, TrainedModel
from neox.launch import host_name
from neox.log import get_logger
from neox.plan import RunPlan

_log = get_logger(__name__)
SLOWER = 1.1
"""Time over the median of hosts from which a host is named."""


class Reading(NamedTuple):
    """How long one rank computed.

    Attributes:
        host: Name of its host.
        stage: Number of its pipeline stage; stages may have different work.
        seconds: Time of its forward and backward passes in a step, without what it waited for others.
    """

    host: str
    stage: int
    seconds: float


def slow_hosts(readings: Sequence[Reading]) -> dict[str, float]:
    """Return hosts that are slower than the median of hosts with the same stage, and how many times as long they take.

    With two hosts the faster one counts as the median.
    """
    stages: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for reading in readings:
        stages[reading.stage][reading.host].append(reading.seconds)
    slow: dict[str, float] = {}
    for hosts in stages.values():
        of_hosts = {host: mean(seconds) for host, seconds in hosts.items()}
        usual = median_low(of_hosts.values())
        for host, seconds in of_hosts.items():
            if usual > 0 and seconds > SLOWER * usual:
                slow[host] = max(slow.get(host, 0.0), seconds / usual)
    return slow


def build(model: TrainedModel, start: RunStart) -> Stragglers | None:
    """Return the comparison; None if it is off, or if there is one rank only."""
    if not model.plan.config.logging.straggler_steps or model.grid.world_size == 1:
        return None
    return Stragglers(model.plan)


class Stragglers(Feature):
    """Comparison of hosts after every `straggler_steps` steps, on every rank.

    All ranks end a step together, so the times of steps do not tell. Compared is the time in which a rank computes, as
    the median over these steps.

    Args:
        plan: Plan of the run.
        host: Name of this host, by default the one in the hostfile, which the status of the run shows.
    """

    needs_computing_time = True

    def __init__(self, plan: RunPlan, host: str | None = None) -> None:
        self._steps = plan.config.logging.straggler_steps
        self._host = host or host_name()
        self._has_several_hosts: bool | None = None  # until the ranks have told each other
        self._seconds: list[float] = []

    def after_step(self, engine: Engine, result: StepResult) -> Mapping[str, float]:
        """Compare the hosts if enough steps are done; on rank 0 name slow ones in the log and in the metrics."""
        if self._has_several_hosts is None:
            self._has_several_hosts = len(set(engine.gather(self._host))) > 1
        if not self._has_several_hosts:
            return {}
        self._seconds.append(result.computing)
        if len(self._seconds) < self._steps:
            return {}
        grid = engine.grid
        reading = Reading(self._host, grid.pp_rank, median(self._seconds))
        self._seconds.clear()
        readings = engine.gather(reading)
        if grid.rank != 0:
            return {}
        slow = slow_hosts(readings)
        for host, ratio in slow.items():
            _log.warning(
                "%s is slow: over %d steps its ranks computed %.2f times as long as the median host's",
                host,
                self._steps,
                ratio,
            )
        return {f"runtime/slow_host/{host}": ratio for host, ratio in slow.items()}
