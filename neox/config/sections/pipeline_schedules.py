"""Table of pipeline schedules, on paper: how stages share the layers, and what each stage keeps while it waits.

The planner divides layers and estimates memory and idle time from an entry. How a rank runs the schedule is up to the
engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias


class PipelineSchedule(ABC):
    """Order in which the stages of a pipeline run the micro batches of one optimizer step.

    Attributes:
        ranges_per_stage: Number of ranges of consecutive layers that each stage holds.
    """

    ranges_per_stage: int

    @abstractmethod
    def stage_of(self, layer_range: int, stages: int) -> int:
        """Return the stage that holds a range of layers; ranges are numbered in the order of their layers."""

    @abstractmethod
    def in_flight(self, stage: int, stages: int, micro_batches: int) -> int:
        """Return how many micro batches' activations a stage keeps at once.

        Args:
            stage: Number of the stage.
            stages: Number of stages.
            micro_batches: Micro batches of one optimizer step.
        """

    @abstractmethod
    def bubble(self, stages: int, micro_batches: int) -> float:
        """Return the fraction of a step in which a stage is idle."""


class OneForwardOneBackward(PipelineSchedule):
    """1F1B: after a warm-up each stage alternates one forward and one backward pass.

    Stage i of p waits for p - i - 1 stages behind it, so it keeps the activations of p - i micro batches.
    PipeDream-Flush, arXiv:2006.09503.
    """

    ranges_per_stage = 1

    def stage_of(self, layer_range: int, stages: int) -> int:
        """Return the stage that holds a range of layers: the one with the same number."""
        return layer_range

    def in_flight(self, stage: int, stages: int, micro_batches: int) -> int:
        """Return how many micro batches' activations a stage keeps; DeepSpeed allocates at least two buffers."""
        if stages == 1:
            return 1
        return min(max(2, stages - stage), micro_batches)

    def bubble(self, stages: int, micro_batches: int) -> float:
        """Return the fraction of a step in which a stage is idle: filling and draining take p - 1 micro batches."""
        waiting = stages - 1
        return waiting / (micro_batches + waiting)


PIPELINE_SCHEDULES: Mapping[str, PipelineSchedule] = MappingProxyType({"1f1b": OneForwardOneBackward()})
"""Value of `pipeline_schedule` -> the schedule."""

if TYPE_CHECKING:
    PipelineScheduleName: TypeAlias = str
else:
    PipelineScheduleName = Literal[tuple(PIPELINE_SCHEDULES)]
