"""Memory of one GPU that only runs a model: its weights, and the keys and values of what it generates."""

from __future__ import annotations

from itertools import pairwise

from neox.config.fit import GIB, usable_bytes
from neox.config.plan import RunPlan
from neox.config.resolve import layer_plan, padded_vocabulary
from neox.config.stages import held_parameters, partition_layers

_MOST_GPUS = 64
_MOST_TENSOR_RANKS = 8  # tensor ranks talk within each layer, and a host seldom has more GPUs


def inference_bytes(plan: RunPlan, pp: int, mp: int) -> int:
    """Return the bytes that the fullest GPU holds at least, with `pp` stages of `mp` tensor ranks each.

    Of the cache the new tokens are counted (prompts are not known); not counted are activations, which a batch or a
    window that is too large can be blamed for.
    """
    config = plan.config
    layers = layer_plan(config, padded_vocabulary(config, plan.vocab_size, mp))
    bounds = partition_layers(layers, pp, config.parallelism.pipe_partition_method, mp)
    keys = config.generation
    size = 4 if (keys.inference_precision or plan.precision) == "fp32" else 2
    sequences = keys.num_beams if keys.num_beams > 1 else keys.generation_batch_size
    cache = 2 * sequences * keys.maximum_tokens * layers.architecture.hidden_size // mp  # keys and values of a block
    held = []
    for first, last in pairwise(bounds):
        here = layers.layers[first:last]
        owners = {layer.index for layer in here}
        weights = sum(held_parameters(layers, layer, mp) for layer in here if layer.tied_to not in owners)
        held.append(size * (weights + cache * sum(layer.kind == "block" for layer in here)))
    return max(held)


def inference_memory_problem(plan: RunPlan, gpu_bytes: float) -> str | None:
    """Return a sentence where a model does not fit on GPUs of this size (bytes), with the fewest that hold it."""
    usable, needed = usable_bytes(gpu_bytes), inference_bytes(plan, plan.grid.pp_size, plan.grid.tp_size)
    if needed <= usable:
        return None
    found = (
        f"weights and cache need {needed / GIB:.1f} GiB of the {usable / GIB:.1f} usable on a GPU of "
        f"{gpu_bytes / GIB:.1f} GiB: the model does not fit"
    )
    gpus = 2
    while gpus <= _MOST_GPUS:
        mp = min(gpus, _MOST_TENSOR_RANKS)
        while plan.architecture.num_attention_heads % mp:
            mp //= 2
        pp = gpus // mp
        if pp <= plan.architecture.num_layers and inference_bytes(plan, pp, mp) <= usable:
            degrees = f"--set model_parallel_size={mp} --set pipe_parallel_size={pp}"
            return f"{found}; it does on {gpus} GPUs: {degrees} --num_gpus {gpus}"
        gpus *= 2
    return f"{found}, nor on {_MOST_GPUS}; set inference_precision to bf16, or use larger GPUs"
