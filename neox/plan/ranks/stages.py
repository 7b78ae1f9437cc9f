"""Pipeline stages: the ranges of layers that each holds, and its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from neox.architecture import WORD_EMBEDDINGS, LayerEntry, LayerPlan, ParameterSpec
from neox.config.neox_config import NeoXConfig
from neox.plan.ranks.partition import partition_layers
from neox.plan.ranks.pipeline_schedules import PIPELINE_SCHEDULES, ranges_per_stage


@dataclass(frozen=True)
class LayerRange:
    """Consecutive layers of the layer plan.

    Attributes:
        start: Number of the first layer.
        stop: Number after the last layer.
    """

    start: int
    stop: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.stop


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage: what each of its ranks holds, split over tensor ranks.

    Attributes:
        index: Number of the stage.
        ranges: Its layers as ranges, ascending; one with `1f1b`.
        parameters: Elements over all tensor ranks, with copies of what another stage owns.
    """

    index: int
    ranges: tuple[LayerRange, ...]
    parameters: int

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of its layers in the layer plan, ascending."""
        return tuple(chain.from_iterable(self.ranges))

    def holds(self, layer: int) -> bool:
        """Return whether a layer is on this stage."""
        return any(layer in layers for layers in self.ranges)

    def entries(self, plan: LayerPlan) -> tuple[LayerEntry, ...]:
        """Return its layers."""
        return tuple(plan[layer] for layer in self.layers)

    def parameter_specs(self, plan: LayerPlan) -> list[ParameterSpec]:
        """Return its parameters: those of its layers, and copies of a tied or shared one that another stage owns."""
        owned = []
        copies = {}
        for layer in self.entries(plan):
            for spec in layer.parameters:
                if spec.shared_with is None:
                    owned.append(spec)
                elif not self.holds(spec.shared_with):
                    copies[spec.name] = spec
            if layer.tied_to is not None and not self.holds(layer.tied_to):
                copies[WORD_EMBEDDINGS] = plan.word_embeddings
        return [*owned, *copies.values()]


@dataclass(frozen=True)
class Division:
    """How layers are divided into pipeline stages.

    Attributes:
        method: `pipe_partition_method`; must be one that `partition_problem` accepts.
        schedule: Value of `pipeline_schedule`, which decides which ranges of layers a stage holds.
        virtual_stages: Value of `virtual_stages`.
    """

    method: str
    schedule: str = "1f1b"
    virtual_stages: int | None = None

    @classmethod
    def of(cls, config: NeoXConfig) -> Division:
        """Return what a configuration asks for."""
        keys = config.parallelism
        return cls(keys.pipe_partition_method, keys.pipeline_schedule, keys.virtual_stages)


def plan_stages(plan: LayerPlan, pp_size: int, division: Division, tp_size: int) -> tuple[StagePlan, ...]:
    """Divide a network into pipeline stages.

    Args:
        plan: Layers to divide.
        pp_size: Number of stages.
        division: How to divide them.
        tp_size: Number of tensor ranks.
    """
    chosen = PIPELINE_SCHEDULES[division.schedule]
    ranges_of_stage = ranges_per_stage(division.schedule, pp_size, division.virtual_stages)
    bounds = partition_layers(plan, pp_size * ranges_of_stage, division.method, tp_size)
    ranges: list[list[LayerRange]] = [[] for _ in range(pp_size)]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        ranges[chosen.stage_of(number, pp_size)].append(LayerRange(start, stop))
    stages = []
    for index, held in enumerate(ranges):
        stage = StagePlan(index, tuple(held), 0)
        parameters = sum(spec.numel for spec in stage.parameter_specs(plan))
        stages.append(replace(stage, parameters=parameters))
    return tuple(stages)
