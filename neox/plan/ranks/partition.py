"""Division of layers into consecutive parts, exactly as DeepSpeed's PipelineModule does it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from neox.architecture import LayerEntry, LayerPlan

# The model's layer classes by kind. DeepSpeed matches `type:REGEX` against these names, case-insensitively, so that
# identity layers must contain neither "transformer" nor "mlp".
LAYER_CLASS_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "EmbeddingLayer",
        "prompt": "SoftPrompt",
        "identity": "IdentityLayer",
        "block": "TransformerLayer",
        "norm": "FinalNorm",
        "head": "Head",
        "masked_lm_head": "MaskedLMHead",
        "sentence_head": "SentenceHead",
        "score_head": "ScoreHead",
        "multi_token": "MultiTokenPrediction",
    }
)


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
    if any(map(matching.search, names)):
        return None
    return f"matches none of the layer classes {', '.join(names)}"


def partition_layers(plan: LayerPlan, parts: int, method: str, tp_size: int = 1) -> list[int]:
    """Return the bounds of consecutive parts: part i holds layers [bounds[i], bounds[i + 1]).

    Modules of multi-token prediction count as a part of the head, since they use its input, and it their outputs.

    Args:
        plan: Layers to divide.
        parts: Number of parts.
        method: `pipe_partition_method`; must be one that `partition_problem` accepts.
        tp_size: Number of tensor ranks; DeepSpeed weighs layers by the parameters that one rank holds.
    """
    assert partition_problem(method) is None
    kind, _, pattern = method.lower().partition(":")  # DeepSpeed lowers the whole method too
    after_head = len(plan.multi_token)
    if kind == "uniform":
        bounds = partition_uniform(len(plan) - after_head, parts)
        return [*bounds[:-1], len(plan)]
    if kind == "parameters":
        weights = [_held_elements(plan, layer, tp_size) for layer in plan]
    else:
        matching = re.compile(pattern, re.IGNORECASE)
        weights = [int(matching.search(LAYER_CLASS_NAMES[layer.kind]) is not None) for layer in plan]
    last = len(plan) - after_head - 1
    weights[last:] = [sum(weights[last:])]
    bounds = partition_balanced(weights, parts)
    return [*bounds[:-1], len(plan)]


def _held_elements(plan: LayerPlan, layer: LayerEntry, tp_size: int) -> int:
    """Return the elements that one tensor rank holds of a layer, with the weight that a tied head uses."""
    held = 0
    for spec in layer.parameters:
        if spec.shared_with is None:
            held += spec.shard_numel(tp_size)
    if layer.tied_to is not None and layer not in plan.multi_token[1:]:  # all modules share one copy
        held += plan.word_embeddings.shard_numel(tp_size)
    return held


def partition_uniform(items: int, parts: int) -> list[int]:
    """Cut `items` into `parts` runs whose lengths differ by at most one, longer ones first."""
    chunk, residual = divmod(items, parts)
    return [part * chunk + min(part, residual) for part in range(parts + 1)]


class _Cut(NamedTuple):
    """A way to cut the first items into parts.

    Attributes:
        largest: Sum of the part with the largest sum.
        smallest: Sum of the part with the smallest sum.
        start: Item at which the last part starts.
    """

    largest: float
    smallest: float
    start: int


_IMPOSSIBLE = _Cut(inf, inf, 0)


def partition_balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Cut weights into `parts` contiguous runs with the smallest difference between the largest and smallest sum.

    The dynamic program (linear partition problem) that DeepSpeed uses since 0.16, with its way of breaking ties: the
    last cut as late as possible.
    """
    count = len(weights)
    if count <= parts:
        return partition_uniform(count, parts)
    prefix = [0, *accumulate(weights)]
    # By number of items, the best cut of the first ones: into no part, then into one part more each time.
    cuts = [_Cut(0, inf, 0), *[_IMPOSSIBLE] * count]
    starts = []
    for part in range(1, parts + 1):
        fewer_parts = cuts
        cuts = [_IMPOSSIBLE] * (count + 1)
        for items in range(part, count + 1):
            cuts[items] = _best_cut(prefix, items, part, fewer_parts)
        starts.append([cut.start for cut in cuts])
    bounds = [count]
    for starts_of_part in reversed(starts):
        bounds.append(starts_of_part[bounds[-1]])
    return bounds[::-1]


def _best_cut(prefix: Sequence[int], items: int, parts: int, fewer_parts: Sequence[_Cut]) -> _Cut:
    """Return the best cut of the first items into parts.

    Args:
        prefix: Sums of the first 0, 1, 2, ... weights.
        items: Number of items.
        parts: Number of parts.
        fewer_parts: Number of items -> the best cut of them into one part less.
    """
    best = _IMPOSSIBLE
    least_difference = inf
    last_start = items - 1 if parts > 1 else 0
    for start in range(last_start, parts - 2, -1):
        run = prefix[items] - prefix[start]
        # The smallest of the runs before is at most their mean, so earlier starts are worse from here on.
        if parts > 1 and run - prefix[start] / (parts - 1) >= least_difference:
            break
        largest = max(fewer_parts[start].largest, run)
        smallest = min(fewer_parts[start].smallest, run)
        if largest - smallest < least_difference:
            least_difference = largest - smallest
            best = _Cut(largest, smallest, start)
    return best
