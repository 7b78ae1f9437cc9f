"""Simulation of a pipeline schedule: when each rank runs its passes.

Legend: a rank holds one or several chunks of layers. A chunk's position is its place in the order of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from neox.plan.ranks.pipeline_schedules import PIPELINE_SCHEDULES, Pass, PipelineSchedule


class TimedPass(NamedTuple):
    """A pass with the time at which it runs, in the unit of the durations that were given."""

    work: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank of a pipeline runs its passes.

    Attributes:
        passes: Passes of each rank, in the order in which they run.
        length: Time from the first pass to the end of the last one.
    """

    passes: tuple[tuple[TimedPass, ...], ...]
    length: float

    def busy(self, rank: int) -> float:
        """Return the time in which a rank computes."""
        return sum(timed.end - timed.start for timed in self.passes[rank])

    @property
    def bubble(self) -> float:
        """Fraction of the ranks' time in which they wait."""
        total = self.length * len(self.passes)
        busy = sum(self.busy(rank) for rank in range(len(self.passes)))
        return 1 - busy / total


def simulate(
    schedule: str,
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    micro_batches: int,
    handoff: float = 0.0,
) -> Timeline:
    """Run a schedule on paper.

    A pass starts when its rank is free and its input has arrived: hidden states from the chunk before it, or gradients
    from the chunk after it.

    Args:
        schedule: Key of `PIPELINE_SCHEDULES`.
        forward: Duration of a forward pass, for each rank and chunk.
        backward: Duration of a backward pass, for each rank and chunk.
        micro_batches: Micro batches of one optimizer step.
        handoff: Time from the end of a pass until its result has arrived on another rank.

    Raises:
        ConfigError: The schedule does not take this number of micro batches.
    """
    simulation = _Simulation(PIPELINE_SCHEDULES[schedule], forward, backward, micro_batches, handoff)
    waiting = list(range(len(forward)))
    while waiting:
        ran = sum([simulation.run(rank) for rank in waiting])
        assert ran, f"the passes of {schedule} wait for each other"
        waiting = [rank for rank in waiting if simulation.has_work(rank)]
    return Timeline(tuple(map(tuple, simulation.done)), max(simulation.clock))


class _Simulation:
    """State of `simulate`, whose arguments it takes.

    Attributes:
        clock: When each rank is free again.
        done: Passes that each rank has run.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        forward: Sequence[Sequence[float]],
        backward: Sequence[Sequence[float]],
        micro_batches: int,
        handoff: float,
    ) -> None:
        ranks = len(forward)
        chunks = len(forward[0])
        self._forward = forward
        self._backward = backward
        self._handoff = handoff
        self._orders: list[list[Pass]] = []
        self._places: list[list[int]] = []  # place of each chunk, by rank
        self.done: list[list[TimedPass]] = []
        for rank in range(ranks):
            self._orders.append(schedule.order(rank, ranks, chunks, micro_batches))
            self._places.append([schedule.place(rank, chunk, ranks) for chunk in range(chunks)])
            self.done.append([])
        self.clock = [0.0] * ranks
        # When each pass ended, by place and micro batch; None before.
        self._forward_ends: list[list[float | None]] = []
        self._backward_ends: list[list[float | None]] = []
        self._owners: list[int] = []
        for place in range(ranks * chunks):
            self._forward_ends.append([None] * micro_batches)
            self._backward_ends.append([None] * micro_batches)
            self._owners.append(schedule.stage_of(place, ranks))

    def has_work(self, rank: int) -> bool:
        """Return whether a rank has not run all of its passes."""
        return len(self.done[rank]) < len(self._orders[rank])

    def run(self, rank: int) -> int:
        """Run a rank's next passes until one has no input; return how many."""
        done = self.done[rank]
        before = len(done)
        clock = self.clock[rank]
        places = self._places[rank]
        order = self._orders[rank]
        for number in range(before, len(order)):  # a copy of the rest of a long order would take most of the time
            work = order[number]
            place = places[work.chunk]
            arrival = self._arrival(rank, place, work)
            if arrival is None:
                break
            start = max(clock, arrival)
            if work.backward:
                clock = start + self._backward[rank][work.chunk]
                self._backward_ends[place][work.micro_batch] = clock
            else:
                clock = start + self._forward[rank][work.chunk]
                self._forward_ends[place][work.micro_batch] = clock
            done.append(TimedPass(work, start, clock))
        self.clock[rank] = clock
        return len(done) - before

    def _arrival(self, rank: int, place: int, work: Pass) -> float | None:
        """Return when a pass's input is there, or None if the pass that makes it has not run."""
        ends = self._backward_ends if work.backward else self._forward_ends
        source = place + 1 if work.backward else place - 1
        if source < 0:
            return 0.0
        if source == len(self._owners):
            return self._forward_ends[place][work.micro_batch]
        end = ends[source][work.micro_batch]
        if end is None or self._owners[source] == rank:
            return end
        return end + self._handoff


PipelineLength = Callable[[str, Sequence[Sequence[float]], Sequence[Sequence[float]], int, float], float]
"""Length of a step from the arguments of `simulate`."""


def simulated_length(
    schedule: str,
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    micro_batches: int,
    handoff: float,
) -> float:
    """Return the length of a step by simulation. Arguments as for `simulate`.

    Once all ranks are at work, as many more micro batches as there are ranks always take as much longer. So a long step
    is simulated with fewer of them, twice.
    """
    ranks = len(forward)
    simulated = PIPELINE_SCHEDULES[schedule].settles_after * ranks + micro_batches % ranks
    if micro_batches <= simulated + ranks:
        return simulate(schedule, forward, backward, micro_batches, handoff).length
    shorter = simulate(schedule, forward, backward, simulated, handoff).length
    longer = simulate(schedule, forward, backward, simulated + ranks, handoff).length
    rounds = (micro_batches - simulated) // ranks
    return shorter + rounds * (longer - shorter)


def quick_length(
    schedule: str,
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    micro_batches: int,
    handoff: float,
) -> float:
    """Return about the length of a step without a simulation: the slowest rank's work, and one fill and drain.

    Arguments as for `simulate`.
    """
    ranks = len(forward)
    chunks = len(forward[0])
    work = [sum(forward[rank]) + sum(backward[rank]) for rank in range(ranks)]
    fill = (sum(work) - max(work)) / chunks
    return max(work) * micro_batches + fill + 2 * (ranks - 1) * handoff
