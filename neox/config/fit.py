"""Whether a run fits on a GPU, and the nearest settings that would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from neox.architecture import Architecture, LayerPlan
from neox.config.memory import MemorySetting, fullest_stage, memory_setting
from neox.config.plan import MemoryPlan, RunPlan
from neox.config.resolve import layer_plan, padded_vocabulary
from neox.config.stages import partition_layers

GIB = 2**30
# Kept free for the CUDA context, communication buffers and fragmentation: so many bytes, and a part of the rest.
RESERVE_BYTES = 2 * GIB
RESERVE_PART = 0.05
_MOST_CHANGES = 6
_MOST_TRIED = 300
_MOST_GROWTH = 64


@dataclass(frozen=True)
class Fit:
    """What a comparison found, in bytes.

    changes: keys and values that would fit, on `world` GPUs, with memory_then; none where it fits or nothing was found.
    """

    fits: bool
    needed: int
    usable: int
    world: int
    changes: tuple[tuple[str, str], ...] = ()
    memory_then: MemoryPlan | None = None


def usable_bytes(gpu_bytes: float) -> int:
    """Return what a GPU of this size leaves to a run."""
    return max(0, int((gpu_bytes - RESERVE_BYTES) * (1 - RESERVE_PART)))


def check_fit(plan: RunPlan, gpu_bytes: float) -> Fit:
    """Compare the fullest GPU with a size in bytes.

    Where it does not fit, look for the nearest settings that do: on these GPUs, then on 2, 4, ... 64 times as many.
    """
    usable, needed = usable_bytes(gpu_bytes), plan.memory.total
    if needed <= usable:
        return Fit(True, needed, usable, plan.grid.world_size)
    start = memory_setting(plan.config, plan.grid, plan.batch, plan.precision, plan.attention)
    method = plan.config.parallelism.pipe_partition_method

    @cache
    def memory(setting: MemorySetting) -> MemoryPlan:
        return fullest_stage(layers(setting.mp), bounds(setting.pp, setting.mp), setting)

    @cache
    def layers(mp: int) -> LayerPlan:  # the vocabulary's padding depends on the degree
        return layer_plan(plan.config, padded_vocabulary(plan.config, plan.vocab_size, mp))

    @cache
    def bounds(pp: int, mp: int) -> list[int]:
        return partition_layers(layers(mp), pp, method, mp)

    growth = 1
    while growth <= _MOST_GROWTH:
        wider = replace(start, dp=start.dp * growth, accumulation=max(1, start.accumulation // growth))
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
    if setting.pp == 1 and setting.zero in (1, 2) and setting.dp > 1:
        yield replace(setting, zero=setting.zero + 1)
    if setting.dp % 2 == 0:
        fewer = replace(setting, dp=setting.dp // 2, accumulation=setting.accumulation * 2)
        if heads % (2 * setting.mp) == 0 and setting.mp < 8:
            yield replace(fewer, mp=setting.mp * 2)
        if setting.zero <= 1 and setting.pp * 2 <= layers:
            yield replace(fewer, pp=setting.pp * 2)


def _changes(before: MemorySetting, after: MemorySetting) -> tuple[tuple[str, str], ...]:
    """Name the keys that differ, and their new values."""
    keys = {
        "pp": "pipe_parallel_size",
        "mp": "model_parallel_size",
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
