"""Memory of generation and evaluation on one rank: weights, keys and values."""

from __future__ import annotations

from neox.architecture import BLOCK_OFFSET, BLOCKS, POSITIONS
from neox.plan.devices.precision import BYTES
from neox.plan.network.architecture import layer_plan
from neox.plan.ranks.stages import Division, plan_stages
from neox.plan.run_plan import RunPlan


def inference_bytes(plan: RunPlan, pp_size: int, tp_size: int) -> int:
    """Return the bytes that the fullest rank of generation or evaluation holds at least.

    For each stage: number x weights, and number x the keys and values of its blocks for all new tokens. Prompts, whose
    length is not known, and activations are not counted.

    Args:
        plan: The plan of the run.
        pp_size: Number of pipeline stages.
        tp_size: Number of tensor ranks of each stage.
    """
    config = plan.config
    layers = layer_plan(config, plan.vocab_size, tp_size)
    stages = plan_stages(layers, pp_size, Division.of(config), tp_size)
    precision = config.generation.inference_precision or plan.precision
    number = BYTES[precision]
    caches = [_cached_bytes(plan, kind, tp_size, number) for kind in plan.architecture.attention]
    most = 0
    loaded = layers.without_multi_token
    for stage in stages:
        weights = sum(spec.shard_numel(tp_size) for spec in stage.parameter_specs(loaded))
        cached = 0
        for layer in stage.entries(layers):
            if layer.kind == "block":
                cached += caches[layer.index - BLOCK_OFFSET]
        most = max(most, number * weights + cached)
    return most


def _cached_bytes(plan: RunPlan, kind: str, tp_size: int, number: int) -> int:
    """Return the bytes of a block's cache on a tensor rank: sequences x tokens x elements per token x number.

    The tokens are the new ones; in a block with a window at most the window's, unless scores have biases, a bound or
    sinks. A state has no tokens, and is fp32. Blocks that keep nothing have no cache.
    """
    generation = plan.config.generation
    sequences = generation.generation_batch_size
    if generation.num_beams > 1:
        sequences = generation.num_beams
    network = plan.architecture
    tokens = generation.maximum_tokens
    plain_scores = not (
        POSITIONS[network.positions].biases_scores or network.attention_softcap or network.attention_sinks
    )
    row = BLOCKS[kind]
    if row.attention is not None and plain_scores:
        tokens = row.attention.keys_per_query(network, tokens)
    if row.keeps == "state":
        return sequences * row.kept(network, tp_size) * BYTES["fp32"]
    return sequences * tokens * row.kept(network, tp_size) * number
