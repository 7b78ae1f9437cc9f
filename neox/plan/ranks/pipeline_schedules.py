"""Table of pipeline schedules: which ranges of layers a stage holds, and the order of its passes in a step.

The engine runs these orders, the planner divides layers and estimates memory from them, and `time.simulation` times
them.

Legend: each stage holds one or several ranges of consecutive layers, numbered in the order of the layers. The place of
a range is its position in the whole network.

    1f1b, 4 stages         interleaved, 4 stages          dualpipev, 4 stages
    stage    0  1  2  3    stage    0   1   2   3         stage    0   1   2   3
    places   0  1  2  3    places   0,4 1,5 2,6 3,7       places   0,7 1,6 2,5 3,4
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from neox.errors import ConfigError


class Pass(NamedTuple):
    """Forward or backward pass of one micro batch through one range of layers.

    Attributes:
        backward: Whether it is the backward pass.
        chunk: Number of the range on its stage.
        micro_batch: Number of the micro batch in the step.
    """

    backward: bool
    chunk: int
    micro_batch: int


class PipelineSchedule(ABC):
    """Order in which the stages of a pipeline run the micro batches of one optimizer step.

    Attributes:
        fixed_ranges: Number of ranges that each stage holds; None if `virtual_stages` says it.
        settles_after: Micro batches for each stage after which a step repeats equal rounds.
    """

    fixed_ranges: int | None
    settles_after = 6

    @abstractmethod
    def order(self, stage: int, stages: int, ranges: int, micro_batches: int) -> list[Pass]:
        """Return the passes of one stage in one step.

        Args:
            stage: Number of the stage.
            stages: Number of stages.
            ranges: Ranges of layers on each stage.
            micro_batches: Micro batches of the step.

        Raises:
            ConfigError: There are fewer micro batches than `least_micro_batches`.
        """

    def least_micro_batches(self, stages: int) -> int:
        """Return how many micro batches a step must have at least."""
        return 1

    def place(self, stage: int, chunk: int, stages: int) -> int:
        """Return the place of a stage's range in the network."""
        return chunk * stages + stage

    def stage_of(self, place: int, stages: int) -> int:
        """Return the stage that holds the range at a place."""
        return place % stages

    def most_kept(self, stage: int, stages: int, ranges: int, micro_batches: int) -> tuple[int, ...]:
        """Return of how many micro batches a stage keeps activations when it keeps the most, for each range."""
        if stages == 1:  # there is no pipeline, and the network is one range whatever the schedule
            return (1,) * ranges
        # The number does not grow once all stages are at work.
        enough = min(micro_batches, 4 * stages)
        return _most_kept(self, stage, stages, ranges, enough)


@cache
def _most_kept(schedule: PipelineSchedule, stage: int, stages: int, ranges: int, micro_batches: int) -> tuple[int, ...]:
    """Return `PipelineSchedule.most_kept` by going through the passes."""
    kept = [0] * ranges
    most = tuple(kept)
    for work in schedule.order(stage, stages, ranges, micro_batches):
        kept[work.chunk] += -1 if work.backward else 1
        if sum(kept) > sum(most):
            most = tuple(kept)
    return most


class OneForwardOneBackward(PipelineSchedule):
    """1F1B: after a warm-up each stage alternates one forward and one backward pass.

    Stage i of p waits for p - i - 1 stages behind it, so it keeps the activations of p - i micro batches.
    PipeDream-Flush, arXiv:2006.09503.
    """

    fixed_ranges = 1
    settles_after = 2

    def order(self, stage: int, stages: int, ranges: int, micro_batches: int) -> list[Pass]:
        """Return the passes of one stage in one step."""
        warmup = min(stages - stage - 1, micro_batches)
        order = [Pass(False, 0, number) for number in range(warmup)]
        for number in range(micro_batches - warmup):
            order.append(Pass(False, 0, number + warmup))
            order.append(Pass(True, 0, number))
        order.extend(Pass(True, 0, number) for number in range(micro_batches - warmup, micro_batches))
        return order


class Interleaved(PipelineSchedule):
    """Interleaved 1F1B: each stage holds several ranges, so that filling the pipeline takes a part of the time.

    As many micro batches as there are stages go through one range after the other, then the next ones. The last of
    these groups also takes what the number of stages does not divide. (Megatron-LM asks for a multiple.)

    Megatron-LM, arXiv:2104.04473, section 2.2.2.
    """

    fixed_ranges = None
    settles_after = 5

    def order(self, stage: int, stages: int, ranges: int, micro_batches: int) -> list[Pass]:
        """Return the passes of one stage in one step."""
        forward, backward = _by_groups(stages, ranges, micro_batches)
        groups = micro_batches // stages
        longest = stages + micro_batches % stages
        total = len(forward)
        warmup = total
        if groups > 1:
            warmup = min(2 * (stages - stage - 1) + (ranges - 1) * longest, total)
        order = list(forward[:warmup])
        for number in range(total - warmup):
            order.append(forward[number + warmup])
            order.append(backward[number])
        order.extend(backward[total - warmup :])
        return order


@cache
def _by_groups(stages: int, ranges: int, micro_batches: int) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """Return forward and backward passes: about as many micro batches as stages through all ranges, then the next ones.

    All stages have them in this order, only the warm-up before the first backward pass differs.
    """
    forward: list[Pass] = []
    first = 0
    while first < micro_batches:
        last = first + stages
        if micro_batches - last < stages:
            last = micro_batches
        for chunk in range(ranges):
            forward.extend(Pass(False, chunk, number) for number in range(first, last))
        first = last
    backward = [Pass(True, ranges - 1 - work.chunk, work.micro_batch) for work in forward]
    return tuple(forward), tuple(backward)


class DualPipeV(PipelineSchedule):
    """DualPipeV as DeepSpeed 0.19.8 orders it: micro batches go to the last stage, turn around and come back.

    Stage i of p holds the ranges at places i and 2 p - 1 - i, so the first stage holds the embedding and the head.
    Weight gradients are not computed apart from the others. https://github.com/deepseek-ai/DualPipe
    """

    fixed_ranges = 2

    def least_micro_batches(self, stages: int) -> int:
        """Return how many micro batches a step must have at least: two for each stage."""
        return 2 * stages

    def place(self, stage: int, chunk: int, stages: int) -> int:
        """Return the place of a stage's range in the network."""
        if chunk == 0:
            return stage
        return 2 * stages - 1 - stage

    def stage_of(self, place: int, stages: int) -> int:
        """Return the stage that holds the range at a place."""
        return min(place, 2 * stages - 1 - place)

    def order(self, stage: int, stages: int, ranges: int, micro_batches: int) -> list[Pass]:
        """Return the passes of one stage in one step."""
        if micro_batches < 2 * stages:
            raise ConfigError(
                f"dualpipev with {stages} stages needs at least {2 * stages} micro batches, not {micro_batches}"
            )
        order: list[Pass] = []
        counters = {(backward, chunk): 0 for backward in (False, True) for chunk in (0, 1)}

        def add(backward: bool, chunk: int) -> None:
            number = counters[backward, chunk]
            counters[backward, chunk] = number + 1
            order.append(Pass(backward, chunk, number))

        behind = stages - stage - 1
        for _ in range(2 * behind):
            add(False, 0)
        for _ in range(stage + 1):
            add(False, 0)
            add(False, 1)
        for _ in range(behind):
            add(True, 1)
            add(False, 1)
        for _ in range(micro_batches - 2 * stages + stage + 1):
            add(False, 0)
            add(True, 1)
            add(False, 1)
            add(True, 0)
        for _ in range(behind):
            add(True, 1)
            add(False, 1)
            add(True, 0)
        for _ in range(stage + 1):
            add(True, 1)
            add(True, 0)
        for _ in range(behind):
            add(True, 0)
        return order


def forward_order(stages: int, ranges: int, micro_batches: int) -> list[Pass]:
    """Return the passes of each stage in an evaluation, which takes any number of micro batches."""
    forward, _ = _by_groups(stages, ranges, micro_batches)
    return list(forward)


PIPELINE_SCHEDULES: Mapping[str, PipelineSchedule] = MappingProxyType(
    {"1f1b": OneForwardOneBackward(), "interleaved": Interleaved(), "dualpipev": DualPipeV()}
)
"""Value of `pipeline_schedule` -> the schedule."""


def ranges_per_stage(schedule: str, pp_size: int, virtual_stages: int | None) -> int:
    """Return how many ranges of layers each stage holds.

    Args:
        schedule: Value of `pipeline_schedule`.
        pp_size: Number of stages.
        virtual_stages: Value of `virtual_stages`; None for its default, 2.
    """
    if pp_size == 1:
        return 1
    fixed = PIPELINE_SCHEDULES[schedule].fixed_ranges
    if fixed is not None:
        return fixed
    return virtual_stages or 2
