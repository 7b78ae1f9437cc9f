"""Memory of generation and evaluation on one rank: weights, keys and values."""

from __future__ import annotations

from neox.plan.architecture import layer_plan
from neox.plan.precision import BYTES
from neox.plan.run_plan import RunPlan
from neox.plan.stages import Division, plan_stages


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
    block_cache = _cached_numbers(plan, tp_size)
    most = 0
    for stage in stages:
        weights = sum(spec.shard_numel(tp_size) for spec in stage.parameter_specs(layers))
        blocks = sum(layer.kind == "block" for layer in stage.entries(layers))
        most = max(most, number * (weights + blocks * block_cache))
    return most


def _cached_numbers(plan: RunPlan, tp_size: int) -> int:
    """Return the elements of a block's cache on a tensor rank: 2 x sequences x new tokens x key heads x head size."""
    generation = plan.config.generation
    sequences = generation.generation_batch_size
    if generation.num_beams > 1:
        sequences = generation.num_beams
    network = plan.architecture
    return 2 * sequences * generation.maximum_tokens * network.attended_heads * network.head_dim // tp_size
