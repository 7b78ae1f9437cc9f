"""Simulation of a pipeline schedule: the order of each rank's passes, and when each pass runs.

Legend: a rank holds one or several chunks of layers. A chunk's position is its place in the order of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from neox.errors import ConfigError


class Pass(NamedTuple):
    """Forward or backward pass of one micro batch through one chunk of layers.

    Attributes:
        backward: Whether it is the backward pass.
        chunk: Number of the chunk on its rank.
        micro_batch: Number of the micro batch in the step.
    """

    backward: bool
    chunk: int
    micro_batch: int


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


def one_forward_one_backward(rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Pass]:
    """Return the passes of one rank under 1F1B (PipeDream-Flush, arXiv:2006.09503)."""
    warmup = min(ranks - rank - 1, micro_batches)
    order = [Pass(False, 0, number) for number in range(warmup)]
    for number in range(micro_batches - warmup):
        order.append(Pass(False, 0, number + warmup))
        order.append(Pass(True, 0, number))
    order.extend(Pass(True, 0, number) for number in range(micro_batches - warmup, micro_batches))
    return order


def interleaved(rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Pass]:
    """Return the passes of one rank under interleaved 1F1B (Megatron-LM, arXiv:2104.04473, section 2.2.2).

    Micro batches go through the chunks in groups of as many as there are ranks.

    Raises:
        ConfigError: The number of micro batches is not a multiple of the number of ranks.
    """
    if micro_batches % ranks:
        raise ConfigError(
            f"an interleaved pipeline of {ranks} stages needs a multiple of {ranks} micro batches, not {micro_batches}"
        )
    total = micro_batches * chunks
    group = ranks * chunks

    def nth(number: int, backward: bool) -> Pass:
        """Return the forward or backward pass that comes at this place among its kind."""
        within = number % group
        chunk = within // ranks
        if backward:
            chunk = chunks - 1 - chunk
        return Pass(backward, chunk, number // group * ranks + within % ranks)

    warmup = total
    if micro_batches > ranks:
        warmup = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)
    order = [nth(number, False) for number in range(warmup)]
    for number in range(total - warmup):
        order.append(nth(number + warmup, False))
        order.append(nth(number, True))
    order.extend(nth(number, True) for number in range(total - warmup, total))
    return order


def dual_pipe_v(rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Pass]:
    """Return the passes of one rank under DualPipeV, as DeepSpeed 0.19.8 orders them.

    Rank r holds the chunks at positions r and 2 x ranks - 1 - r. Weight gradients are not computed apart.

    Raises:
        ConfigError: There are fewer than 2 x ranks micro batches.
    """
    if micro_batches < 2 * ranks:
        raise ConfigError(
            f"dualpipev with {ranks} stages needs at least {2 * ranks} micro batches, not {micro_batches}"
        )
    order: list[Pass] = []
    counters = {(backward, chunk): 0 for backward in (False, True) for chunk in (0, 1)}

    def add(backward: bool, chunk: int) -> None:
        number = counters[backward, chunk]
        counters[backward, chunk] = number + 1
        order.append(Pass(backward, chunk, number))

    behind = ranks - rank - 1
    for _ in range(2 * behind):
        add(False, 0)
    for _ in range(rank + 1):
        add(False, 0)
        add(False, 1)
    for _ in range(behind):
        add(True, 1)
        add(False, 1)
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        add(False, 0)
        add(True, 1)
        add(False, 1)
        add(True, 0)
    for _ in range(behind):
        add(True, 1)
        add(False, 1)
        add(True, 0)
    for _ in range(rank + 1):
        add(True, 1)
        add(True, 0)
    for _ in range(behind):
        add(True, 0)
    return order


Order = Callable[[int, int, int, int], list[Pass]]

ORDERS: Mapping[str, Order] = MappingProxyType(
    {"1f1b": one_forward_one_backward, "interleaved": interleaved, "dualpipev": dual_pipe_v}
)
"""Value of `pipeline_schedule` -> order of a rank's passes, from (rank, ranks, chunks, micro batches)."""


def position(schedule: str, rank: int, chunk: int, ranks: int) -> int:
    """Return a chunk's place in the order of the layers."""
    if schedule == "dualpipev" and chunk == 1:
        return 2 * ranks - 1 - rank
    return chunk * ranks + rank


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
        schedule: Key of `ORDERS`.
        forward: Duration of a forward pass, for each rank and chunk.
        backward: Duration of a backward pass, for each rank and chunk.
        micro_batches: Micro batches of one optimizer step.
        handoff: Time from the end of a pass until its result has arrived on another rank.

    Raises:
        ConfigError: The schedule does not take this number of micro batches.
    """
    ranks = len(forward)
    chunks = len(forward[0])
    last = ranks * chunks - 1
    orders = [ORDERS[schedule](rank, ranks, chunks, micro_batches) for rank in range(ranks)]
    places = [[position(schedule, rank, chunk, ranks) for chunk in range(chunks)] for rank in range(ranks)]
    owners = {place: rank for rank in range(ranks) for place in places[rank]}
    ended: dict[tuple[bool, int, int], float] = {}
    clock = [0.0] * ranks
    done: list[list[TimedPass]] = [[] for _ in range(ranks)]

    def arrival(rank: int, work: Pass) -> float | None:
        """Return when a pass's input is there, or None if the pass that makes it has not run."""
        place = places[rank][work.chunk]
        if not work.backward and place == 0:
            return 0.0
        if work.backward and place == last:
            return ended.get((False, place, work.micro_batch))
        source = place + 1 if work.backward else place - 1
        end = ended.get((work.backward, source, work.micro_batch))
        if end is None or owners[source] == rank:
            return end
        return end + handoff

    waiting = set(range(ranks))
    while waiting:
        progress = False
        for rank in sorted(waiting):
            order = orders[rank]
            while len(done[rank]) < len(order):
                work = order[len(done[rank])]
                ready = arrival(rank, work)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                durations = backward if work.backward else forward
                end = start + durations[rank][work.chunk]
                ended[work.backward, places[rank][work.chunk], work.micro_batch] = end
                clock[rank] = end
                done[rank].append(TimedPass(work, start, end))
                progress = True
            if len(done[rank]) == len(order):
                waiting.discard(rank)
        assert progress, f"the passes of {schedule} wait for each other"
    return Timeline(tuple(map(tuple, done)), max(clock))


PipelineLength = Callable[[str, Sequence[Sequence[float]], Sequence[Sequence[float]], int, float], float]
"""Length of a step from the arguments of `simulate`."""


def simulated_length(
    schedule: str,
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    micro_batches: int,
    handoff: float,
) -> float:
    """Return the length of a step by simulation. Arguments as for `simulate`."""
    return simulate(schedule, forward, backward, micro_batches, handoff).length


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
