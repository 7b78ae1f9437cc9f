"""Division of layers into pipeline stages, exactly as DeepSpeed's PipelineModule does it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from neox.architecture import WORD_EMBEDDINGS, LayerEntry, LayerPlan

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


def partition_layers(plan: LayerPlan, stages: int, method: str, mp: int = 1) -> list[int]:
    """Return the stage bounds: stage i holds layers [bounds[i], bounds[i + 1]).

    Args:
        plan: Layers to divide.
        stages: Number of stages.
        method: `pipe_partition_method`; must be one that `partition_problem` accepts.
        mp: Tensor-parallel ranks; DeepSpeed weighs layers by the parameters that one rank holds.
    """
    assert partition_problem(method) is None
    kind, _, pattern = method.lower().partition(":")  # DeepSpeed lowers the whole method too
    if kind == "uniform":
        return partition_uniform(len(plan), stages)
    if kind == "parameters":
        return partition_balanced([held_parameters(plan, layer, mp) for layer in plan], stages)
    matching = re.compile(pattern, re.IGNORECASE)
    return partition_balanced([int(bool(matching.search(LAYER_CLASS_NAMES[layer.kind]))) for layer in plan], stages)


def held_parameters(plan: LayerPlan, layer: LayerEntry, mp: int, *, trained: bool = False, tied: bool = True) -> int:
    """Return the elements one of `mp` tensor ranks holds of a layer, shared ones not.

    Args:
        plan: The layers.
        layer: One of them.
        mp: Tensor-parallel ranks.
        trained: Count only what is trained.
        tied: Count a tied head's copy, too.
    """
    held = tuple(p for p in layer.parameters if p.shared_with is None)
    if layer.tied_to is not None and tied:
        held += tuple(p for p in plan[layer.tied_to].parameters if p.name == WORD_EMBEDDINGS)
    held = tuple(p for p in held if p.trained or not trained)
    return sum(p.numel // mp if p.partition_dim is not None else p.numel for p in held)


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
