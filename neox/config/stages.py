"""Divide layers into pipeline stages exactly as DeepSpeed's PipelineModule does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from neox.config.layer_plan import LayerEntry, LayerPlan
from neox.errors import ConfigError

# The model's layer classes by kind. DeepSpeed matches `type:REGEX` against these names, case-insensitively, so that
# identity layers must contain neither "transformer" nor "mlp".
LAYER_CLASS_NAMES = {
    "embedding": "EmbeddingLayer",
    "identity": "IdentityLayer",
    "block": "TransformerLayer",
    "norm": "FinalNorm",
    "head": "Head",
}


def partition_layers(plan: LayerPlan, stages: int, method: str) -> list[int]:
    """Return the stage bounds: stage i holds layers [bounds[i], bounds[i + 1]). Raises ConfigError."""
    kind = method.lower()
    if kind == "uniform":
        return partition_uniform(len(plan), stages)
    if kind == "parameters":
        return partition_balanced([_held_parameters(plan, layer) for layer in plan], stages)
    if kind.startswith("type:"):
        try:
            pattern = re.compile(method.split(":", 1)[1], re.IGNORECASE)
        except re.error as error:
            raise ConfigError(f"`pipe_partition_method: {method}` is not a regular expression: {error}") from None
        weights = [int(bool(pattern.search(LAYER_CLASS_NAMES[layer.kind]))) for layer in plan]
        if not any(weights):
            names = ", ".join(LAYER_CLASS_NAMES.values())
            raise ConfigError(f"`pipe_partition_method: {method}` matches none of the layer classes {names}")
        return partition_balanced(weights, stages)
    raise ConfigError(f"`pipe_partition_method: {method}` should be uniform, parameters or type:REGEX")


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
            for k in range(j - 1, i):
                run = prefix[i] - prefix[k]
                high, low = max(largest[j - 1][k], run), min(smallest[j - 1][k], run)
                if high - low <= best:
                    best, largest[j][i], smallest[j][i], start[j][i] = high - low, high, low, k
    bounds = [n]
    for j in range(parts, 0, -1):
        bounds.append(start[j][bounds[-1]])
    return bounds[::-1]


def _held_parameters(plan: LayerPlan, layer: LayerEntry) -> int:
    return plan[layer.tied_to].numel if layer.tied_to is not None else layer.numel
