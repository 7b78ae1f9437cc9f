"""Comparison of a run's memory with a GPU, and search for the nearest settings that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from neox.architecture import Architecture, LayerPlan
from neox.config.architecture import layer_plan, padded_vocabulary
from neox.config.memory import MemorySetting, fullest_stage, memory_setting
from neox.config.plan import MemoryPlan, RunPlan
from neox.config.stages import held_parameters, partition_layers

GIB = 2**30
# Reserved for the CUDA context, communication buffers and fragmentation: these bytes, and a fraction of the rest.
RESERVE_BYTES = 2 * GIB
RESERVE_PART = 0.05
_MOST_CHANGES = 6
_MOST_TRIED = 300
_MOST_GROWTH = 64
_MOST_GPUS = 64
_MOST_TENSOR_RANKS = 8  # tensor ranks communicate within each layer, and a host seldom has more GPUs


@dataclass(frozen=True)
class Fit:
    """Result of a comparison.

    Attributes:
        fits: Whether the run fits.
        needed: Bytes on the fullest GPU.
        usable: Bytes that a GPU leaves to a run.
        world: Number of GPUs on which the changed settings fit.
        changes: Keys and values that fit; none where the run fits or nothing was found.
        memory_then: Memory with these changes.
    """

    fits: bool
    needed: int
    usable: int
    world: int
    changes: tuple[tuple[str, str], ...] = ()
    memory_then: MemoryPlan | None = None


def usable_bytes(gpu_bytes: float) -> int:
    """Return the bytes that a GPU of this size (bytes) leaves to a run."""
    return max(0, int((gpu_bytes - RESERVE_BYTES) * (1 - RESERVE_PART)))


def check_fit(plan: RunPlan, gpu_bytes: float) -> Fit:
    """Compare the fullest GPU with a size in bytes.

    If it does not fit, search the nearest settings that do: on these GPUs, then on 2, 4, ... 64 times as many.
    """
    usable, needed = usable_bytes(gpu_bytes), plan.memory.total
    if needed <= usable:
        return Fit(True, needed, usable, plan.grid.world_size)
    start = memory_setting(plan.config, plan.grid, plan.batch, plan.precision, plan.attention)
    method = plan.config.parallelism.pipe_partition_method

    @cache
    def memory(setting: MemorySetting) -> MemoryPlan:
        return fullest_stage(layers(setting.tp_size), bounds(setting.pp_size, setting.tp_size), setting)

    @cache
    def layers(mp: int) -> LayerPlan:  # the vocabulary's padding depends on the degree
        return layer_plan(plan.config, padded_vocabulary(plan.config, plan.vocab_size, mp))

    @cache
    def bounds(pp: int, mp: int) -> list[int]:
        return partition_layers(layers(mp), pp, method, mp)

    growth = 1
    while growth <= _MOST_GROWTH:
        wider = replace(start, dp_size=start.dp_size * growth, accumulation=max(1, start.accumulation // growth))
        found = _search(wider, plan.architecture, lambda setting: memory(setting).total <= usable)
        if found is not None:
            return Fit(False, needed, usable, plan.grid.world_size * growth, _changes(start, found), memory(found))
        growth *= 2
    return Fit(False, needed, usable, plan.grid.world_size)


def _search(
    start: MemorySetting, architecture: Architecture, fits: Callable[[MemorySetting], bool]
) -> MemorySetting | None:
    """Return the setting that fits after the fewest moves, among a bounded number."""
    if fits(start):
        return start
    tried, frontier = {start}, [start]
    for _ in range(_MOST_CHANGES):
        following: list[MemorySetting] = []
        for setting in frontier:
            for candidate in _moves(setting, architecture.num_attention_heads, architecture.num_layers):
                if candidate in tried or len(tried) >= _MOST_TRIED:
                    continue
                if fits(candidate):
                    return candidate
                tried.add(candidate)
                following.append(candidate)
        frontier = following
    return None


def _moves(setting: MemorySetting, heads: int, layers: int) -> Iterator[MemorySetting]:
    """Yield settings one step away that need less memory, cheapest in speed first; the batch stays the same."""
    if setting.zero == 0:
        yield replace(setting, zero=1, fp32_gradients=setting.precision == "bf16")
    if setting.attention != "flash":
        yield replace(setting, attention="flash")
    if setting.micro % 2 == 0:
        yield replace(setting, micro=setting.micro // 2, accumulation=setting.accumulation * 2)
    if not setting.recompute:
        yield replace(setting, recompute=1)
    if setting.pp_size == 1 and setting.zero in (1, 2) and setting.dp_size > 1:
        yield replace(setting, zero=setting.zero + 1)
    if setting.dp_size % 2 == 0:
        fewer = replace(setting, dp_size=setting.dp_size // 2, accumulation=setting.accumulation * 2)
        if heads % (2 * setting.tp_size) == 0 and setting.tp_size < 8:
            yield replace(fewer, tp_size=setting.tp_size * 2)
        if setting.zero <= 1 and setting.pp_size * 2 <= layers:
            yield replace(fewer, pp_size=setting.pp_size * 2)


def _changes(before: MemorySetting, after: MemorySetting) -> tuple[tuple[str, str], ...]:
    """Name the keys that differ, and their new values."""
    keys = {
        "pp_size": "pipe_parallel_size",
        "tp_size": "model_parallel_size",
        "zero": "zero_optimization.stage",
        "micro": "train_micro_batch_size_per_gpu",
        "accumulation": "gradient_accumulation_steps",
    }
    changes = [
        (key, str(getattr(after, name))) for name, key in keys.items() if getattr(before, name) != getattr(after, name)
    ]
    if after.recompute != before.recompute:
        changes.append(("checkpoint_activations", "true"))
    if after.attention != before.attention:
        changes.append(("attention_config", '[[["flash"], "all"]]'))
    return tuple(changes)


def inference_bytes(plan: RunPlan, pp: int, mp: int) -> int:
    """Return the bytes that the fullest GPU of generation or evaluation holds at least.

    Weights, and the keys and values of new tokens are counted; prompts, which are not known, and activations are not.

    Args:
        plan: The plan of the run.
        pp: Pipeline stages.
        mp: Tensor ranks of each stage.
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
    """Return a message if a model does not fit on GPUs of this size (bytes), with the fewest GPUs that hold it."""
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
