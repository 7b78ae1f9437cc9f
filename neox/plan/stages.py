"""Division of layers into pipeline stages, exactly as DeepSpeed's PipelineModule does it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf

from neox.architecture import WORD_EMBEDDINGS, LayerEntry, LayerPlan, ParameterSpec
from neox.config.sections.pipeline_schedules import PIPELINE_SCHEDULES

# The model's layer classes by kind. DeepSpeed matches `type:REGEX` against these names, case-insensitively, so that
# identity layers must contain neither "transformer" nor "mlp".
LAYER_CLASS_NAMES = {
    "embedding": "EmbeddingLayer",
    "prompt": "SoftPrompt",
    "identity": "IdentityLayer",
    "block": "TransformerLayer",
    "norm": "FinalNorm",
    "head": "Head",
    "masked_lm_head": "MaskedLMHead",
    "sentence_head": "SentenceHead",
}


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
        ranges: Its layers as ranges, ascending. `1f1b` gives each stage one.
        parameters: Elements over all tensor ranks, with copies of what another stage owns.
    """

    index: int
    ranges: tuple[LayerRange, ...]
    parameters: int

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of its layers in the layer plan, ascending."""
        return tuple(layer for layers in self.ranges for layer in layers)

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


def plan_stages(plan: LayerPlan, pp_size: int, method: str, schedule: str, tp_size: int) -> tuple[StagePlan, ...]:
    """Divide a network into pipeline stages.

    Args:
        plan: Layers to divide.
        pp_size: Number of stages.
        method: `pipe_partition_method`; must be one that `partition_problem` accepts.
        schedule: Name of the pipeline schedule, which decides how many ranges of layers a stage holds.
        tp_size: Number of tensor ranks.
    """
    chosen = PIPELINE_SCHEDULES[schedule]
    bounds = partition_layers(plan, pp_size * chosen.ranges_per_stage, method, tp_size)
    ranges: list[list[LayerRange]] = [[] for _ in range(pp_size)]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        ranges[chosen.stage_of(number, pp_size)].append(LayerRange(start, stop))
    stages = []
    for index, held in enumerate(ranges):
        stage = StagePlan(index, tuple(held), 0)
        parameters = sum(spec.numel for spec in stage.parameter_specs(plan))
        stages.append(replace(stage, parameters=parameters))
    return tuple(stages)


def partition_problem(method: str) -> str | None:
    """Return what is wrong with a pipe_partition_method, or None."""
    kind, colon, pattern = method.partition(":")
    if kind.lower() in ("uniform", "parameters") and not colon:
        return None
    if kind.lower() != "type" or not colon:
        return "should be uniform, parameters or type:REGEX"
    try:
        matching = re.compile(pattern.lower(), re.IGNORECASE)
    except re.error as error:
        return f"is no regular expression: {error}"
    names = LAYER_CLASS_NAMES.values()
    return None if any(map(matching.search, names)) else f"matches none of the layer classes {', '.join(names)}"


def partition_layers(plan: LayerPlan, parts: int, method: str, tp_size: int = 1) -> list[int]:
    """Return the bounds of consecutive parts: part i holds layers [bounds[i], bounds[i + 1]).

    Args:
        plan: Layers to divide.
        parts: Number of parts.
        method: `pipe_partition_method`; must be one that `partition_problem` accepts.
        tp_size: Number of tensor ranks; DeepSpeed weighs layers by the parameters that one rank holds.
    """
    assert partition_problem(method) is None
    kind, _, pattern = method.lower().partition(":")  # DeepSpeed lowers the whole method too
    if kind == "uniform":
        return partition_uniform(len(plan), parts)
    if kind == "parameters":
        return partition_balanced([_held_elements(plan, layer, tp_size) for layer in plan], parts)
    matching = re.compile(pattern, re.IGNORECASE)
    matches = [matching.search(LAYER_CLASS_NAMES[layer.kind]) is not None for layer in plan]
    return partition_balanced([int(match) for match in matches], parts)


def _held_elements(plan: LayerPlan, layer: LayerEntry, tp_size: int) -> int:
    """Return the elements that one tensor rank holds of a layer, with the weight that a tied head uses."""
    held = [spec for spec in layer.parameters if spec.shared_with is None]
    if layer.tied_to is not None:
        held.append(plan.word_embeddings)
    return sum(spec.shard_numel(tp_size) for spec in held)


def partition_uniform(items: int, parts: int) -> list[int]:
    """Cut `items` into `parts` runs whose lengths differ by at most one, longer ones first."""
    if items <= parts:
        return [min(part, items) for part in range(parts + 1)]
    chunk, residual = divmod(items, parts)
    return [part * chunk + min(part, residual) for part in range(parts + 1)]


def partition_balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Cut weights into `parts` contiguous runs with the smallest difference between the largest and smallest sum.

    The dynamic program (linear partition problem) that DeepSpeed uses since 0.16, with its way of breaking ties: the
    last cut as late as possible.
    """
    n = len(weights)
    if n <= parts:
        return partition_uniform(n, parts)
    prefix = [0, *accumulate(weights)]
    # [j][i], the best cut of the first i items into j parts: its largest and smallest sum, and where part j starts.
    largest = [[inf] * (n + 1) for _ in range(parts + 1)]
    smallest = [[inf] * (n + 1) for _ in range(parts + 1)]
    start = [[0] * (n + 1) for _ in range(parts + 1)]
    largest[0][0] = 0
    for j in range(1, parts + 1):
        for i in range(j, n + 1):
            best = inf
            for k in range(i - 1 if j > 1 else 0, j - 2, -1):
                run = prefix[i] - prefix[k]
                # The smallest of the j - 1 runs before k is at most their mean, so earlier cuts are worse from here on.
                if j > 1 and run - prefix[k] / (j - 1) >= best:
                    break
                high, low = max(largest[j - 1][k], run), min(smallest[j - 1][k], run)
                if high - low < best:
                    best, largest[j][i], smallest[j][i], start[j][i] = high - low, high, low, k
    bounds = [n]
    for j in range(parts, 0, -1):
        bounds.append(start[j][bounds[-1]])
    return bounds[::-1]
