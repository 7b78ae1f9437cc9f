"""Whether a run fits on a GPU, and the nearest settings that would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from neox.config.memory import MemorySetting, fullest_stage, memory_setting
from neox.config.plan import MemoryPlan, RunPlan
from neox.config.stages import partition_layers

GIB = 2**30
# Kept free for the CUDA context, communication buffers and fragmentation: so many bytes, and a part of the rest.
RESERVE_BYTES = 2 * GIB
RESERVE_PART = 0.05
_MOST_CHANGES = 4
_MOST_TRIED = 400


@dataclass(frozen=True)
class Fit:
    """What a comparison found. changes: settings (key, value) that would fit, nearest first; empty when nothing does."""

    fits: bool
    needed: int
    usable: int
    changes: tuple[tuple[str, str], ...] = ()
    memory_then: MemoryPlan | None = None


def usable_bytes(gpu_bytes: float) -> int:
    """Return what a GPU of this size leaves to a run."""
    return max(0, int((gpu_bytes - RESERVE_BYTES) * (1 - RESERVE_PART)))


def check_fit(plan: RunPlan, gpu_bytes: float) -> Fit:
    """Compare the fullest GPU with a size in bytes; where it does not fit, look for the nearest settings that do."""
    usable = usable_bytes(gpu_bytes)
    if plan.memory.total <= usable:
        return Fit(True, plan.memory.total, usable)
    start = memory_setting(plan.config, plan.grid, plan.batch, plan.precision, plan.attention)
    method, layers = plan.config.parallelism.pipe_partition_method, plan.layers

    @cache
    def bounds(pp: int, mp: int) -> list[int]:
        return partition_layers(layers, pp, method, mp)

    def memory(setting: MemorySetting) -> MemoryPlan:
        return fullest_stage(layers, bounds(setting.pp, setting.mp), setting)

    tried, frontier = {start}, [start]
    for _ in range(_MOST_CHANGES):
        following: list[MemorySetting] = []
        for setting in frontier:
            for candidate in _moves(setting, layers.num_attention_heads, layers.num_layers):
                if candidate in tried or len(tried) >= _MOST_TRIED:
                    continue
                tried.add(candidate)
                found = memory(candidate)
                if found.total <= usable:
                    return Fit(False, plan.memory.total, usable, _changes(start, candidate), found)
                following.append(candidate)
        frontier = following
    return Fit(False, plan.memory.total, usable)


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
