"""Comparison of a run's memory with a GPU or a host, and search for the nearest settings that fit."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from neox.architecture import POSITIONS, Architecture, LayerPlan
from neox.plan.architecture import layer_plan, padded_vocabulary
from neox.plan.memory.estimate import divides_states, fullest_stage, stage_memory
from neox.plan.memory.setting import MemorySetting, memory_setting
from neox.plan.run_plan import MemoryPlan, RunPlan
from neox.plan.stages import StagePlan, held_parameters, plan_stages

GIB = 2**30
# Reserved for the CUDA context, communication buffers and fragmentation: these bytes, and a fraction of the rest.
RESERVE_BYTES = 2 * GIB
RESERVE_PART = 0.05
# Main memory of a process of torch and DeepSpeed before it holds a model (measured: 0.25 GiB).
PROCESS_BYTES = GIB // 4
# Dense bf16 peak of one H100 SXM, assumed where peak_theoretical_tflops is not given.
ASSUMED_PEAK_TFLOPS = 989.0
# Largest heads that torch's flash kernels serve.
_FLASH_HEAD_DIM = 256
_MOST_CHANGES = 6
_MOST_TRIED = 300
_MOST_GROWTH = 64
_MOST_GPUS = 64
_MOST_TENSOR_RANKS = 8  # tensor ranks communicate within each layer, and a host seldom has more GPUs


@dataclass(frozen=True)
class Device:
    """What one rank runs on, as far as its memory and speed are known.

    Attributes:
        name: For messages: `a GPU of 80.0 GiB`.
        source: Where its size comes from.
        size: Its memory in bytes.
        usable: Bytes that it leaves to a rank.
        shared: Whether the ranks of a host share its memory, so that more ranks there do not help.
        peak_tflops: Peak of its arithmetic; None where nothing is assumed.
    """

    name: str
    source: str
    size: int
    usable: int
    shared: bool
    peak_tflops: float | None


def gpu_device(plan: RunPlan, size: float | None = None) -> Device:
    """Return a GPU of a size in bytes; where that is not given, of `gpu_memory_gib`."""
    config = plan.config
    source = config.source("gpu_memory_gib") if size is None else "the smallest GPU of this machine"
    size = config.runner.gpu_memory_gib * GIB if size is None else size
    peak = config.logging.peak_theoretical_tflops or ASSUMED_PEAK_TFLOPS
    return Device(
        f"a GPU of {size / GIB:.1f} GiB", f"gpu_memory_gib: {source}", int(size), usable_bytes(size), False, peak
    )


def host_device(plan: RunPlan, ranks: Sequence[int], host: str, available: int | None, *, training: bool) -> Device:
    """Return the share that the largest of a host's CPU ranks has of its main memory.

    Args:
        plan: The plan.
        ranks: The ranks on the host.
        host: Name of the host.
        available: Bytes that the host has available, unless `host_memory_gib` says how many to count with; None where
            they are not known, which counts as enough.
        training: Whether the model is trained, not only run.
    """
    config, key = plan.config, "host_memory_gib"
    if config.runner.host_memory_gib is not None:
        size, source = int(config.runner.host_memory_gib * GIB), config.source(key)
    else:
        size, source = (2**63, "not known") if available is None else (available, "what is available now")
    needs = [rank_bytes(plan, rank, training=training) for rank in ranks]
    free = size - len(needs) * PROCESS_BYTES
    usable = max(0, free * max(needs) // sum(needs))
    amount = "enough memory" if size == 2**63 else f"{size / GIB:.1f} GiB"
    shared = "" if len(needs) == 1 else f", which {len(needs)} ranks share"
    name = f"{host} with {amount}{shared}"
    return Device(name, f"{key}: {source}", size, usable, True, config.logging.peak_theoretical_tflops)


def rank_bytes(plan: RunPlan, rank: int, *, training: bool) -> int:
    """Return the estimated bytes of one CPU rank, without its interpreter and libraries."""
    if not training:
        return inference_bytes(plan, plan.grid.pp_size, plan.grid.tp_size)
    memory = rank_memory(plan, rank, on_cpu=True)
    return memory.total + memory.main_memory


def rank_memory(plan: RunPlan, rank: int, *, on_cpu: bool) -> MemoryPlan:
    """Return the estimate of one rank in training."""
    stage, data_rank, _ = plan.grid.coordinates(rank)
    setting = _setting(plan, on_cpu=on_cpu)
    if data_rank > 0:  # only the first one writes what all hold
        setting = replace(
            setting, copies_weights=False, copies_states=setting.copies_states and divides_states(setting)
        )
    return stage_memory(plan.layers, plan.stages[stage], setting)


def memory_on(plan: RunPlan, device: Device) -> MemoryPlan:
    """Return the estimate of the fullest rank in training on its device."""
    return fullest_stage(plan.layers, plan.stages, _setting(plan, on_cpu=device.shared))


def needed_bytes(memory: MemoryPlan, device: Device) -> int:
    """Return the bytes of an estimate that a device holds: on CPUs also what is in main memory."""
    return memory.total + (memory.main_memory if device.shared else 0)


def host_problem(plan: RunPlan, ranks: Sequence[int], host: str, available: int | None) -> str | None:
    """Return a message if what GPU ranks of a host offload, or copy to save it, does not fit in its main memory.

    Args:
        plan: The plan.
        ranks: The ranks on the host.
        host: Its name.
        available: Bytes that the host has available, unless `host_memory_gib` says how many to count with.
    """
    memories = [rank_memory(plan, rank, on_cpu=False) for rank in ranks]
    held = sum(memory.main_memory for memory in memories)
    needed = held + len(ranks) * PROCESS_BYTES
    if plan.config.runner.host_memory_gib is not None:
        available = int(plan.config.runner.host_memory_gib * GIB)
    if not held or available is None or needed <= available:
        return None
    uses = {
        "use more hosts, or offload less": ("offload", sum(memory.host for memory in memories)),
        "save without async_save": ("copy for background saves", sum(memory.copies for memory in memories)),
    }
    kinds = " and ".join(f"{what} {gib(count)}" for what, count in uses.values() if count)
    return (
        f"{host}: {len(ranks)} ranks {kinds}, {gib(needed)} with their processes, to main memory of which "
        f"{gib(available)} are available; {', or '.join(way for way, (_, count) in uses.items() if count)}"
    )


def _setting(plan: RunPlan, *, on_cpu: bool) -> MemorySetting:
    setting = memory_setting(plan.config, plan.grid, plan.batch, plan.precision, plan.attention)
    return replace(setting, on_cpu=on_cpu)


@dataclass(frozen=True)
class Fit:
    """Result of a comparison.

    Attributes:
        fits: Whether the run fits.
        needed: Bytes of the fullest rank.
        world: Number of GPUs on which the changed settings fit.
        changes: Keys and values that fit; none where the run fits or nothing was found.
        memory_then: Memory with these changes.
    """

    fits: bool
    needed: int
    world: int
    changes: tuple[tuple[str, str], ...] = ()
    memory_then: MemoryPlan | None = None


def usable_bytes(gpu_bytes: float) -> int:
    """Return the bytes that a GPU of this size (bytes) leaves to a run."""
    return max(0, int((gpu_bytes - RESERVE_BYTES) * (1 - RESERVE_PART)))


def check_fit(plan: RunPlan, device: Device) -> Fit:
    """Compare the fullest rank of a training with the bytes that its device leaves to it.

    If it does not fit, search the nearest settings that do: on these devices, then on 2, 4, ... 64 times as many.
    """
    usable, needed = device.usable, needed_bytes(memory_on(plan, device), device)
    if needed <= usable:
        return Fit(True, needed, plan.grid.world_size)
    start = _setting(plan, on_cpu=device.shared)
    parallelism = plan.config.parallelism

    @cache
    def memory(setting: MemorySetting) -> MemoryPlan:
        return fullest_stage(layers(setting.tp_size), stages(setting.pp_size, setting.tp_size), setting)

    @cache
    def layers(tp_size: int) -> LayerPlan:  # the vocabulary's padding depends on the degree
        return layer_plan(plan.config, padded_vocabulary(plan.config, plan.vocab_size, tp_size))

    @cache
    def stages(pp_size: int, tp_size: int) -> tuple[StagePlan, ...]:
        method, schedule = parallelism.pipe_partition_method, parallelism.pipeline_schedule
        return plan_stages(layers(tp_size), pp_size, method, schedule, tp_size)

    growth = 1
    while growth <= (1 if device.shared else _MOST_GROWTH):
        wider = replace(start, dp_size=start.dp_size * growth, accumulation=max(1, start.accumulation // growth))
        found = _search(wider, plan.architecture, lambda setting: needed_bytes(memory(setting), device) <= usable)
        if found is not None:
            return Fit(False, needed, plan.grid.world_size * growth, _changes(start, found), memory(found))
        growth *= 2
    return Fit(False, needed, plan.grid.world_size)


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
            for candidate in _moves(setting, architecture.num_kv_heads, architecture.num_layers):
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
    if not setting.recompute and setting.kept == 1.0:  # a budget chooses what is recomputed
        yield replace(setting, recompute=1)
    elif setting.recomputed != "full" or setting.keeping:
        yield replace(setting, recomputed="full", keeping=())
    if setting.pp_size == 1 and setting.zero in (1, 2) and setting.dp_size > 1:
        yield replace(setting, zero=setting.zero + 1)
    if setting.dp_size % 2 == 0:
        fewer = replace(setting, dp_size=setting.dp_size // 2, accumulation=setting.accumulation * 2)
        divides = setting.sequence % (2 * setting.token_shares) == 0 or not setting.divides_tokens
        if heads % (2 * setting.tp_size) == 0 and setting.tp_size < 8 and divides:
            yield replace(fewer, tp_size=setting.tp_size * 2)
        if setting.zero <= 1 and setting.pp_size * 2 <= layers:
            yield replace(fewer, pp_size=setting.pp_size * 2)
    if setting.zero and not setting.offload and not setting.on_cpu:  # slow: states cross the bus at each step
        yield replace(setting, offload=1)
    if setting.offload and setting.zero in (1, 2) and setting.pp_size == 1:
        yield replace(setting, zero=setting.zero + 1)
    if setting.offload == 1 and setting.zero == 3:
        yield replace(setting, offload=2)


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
    if after.recomputed != before.recomputed:
        changes.append(("recompute_granularity", after.recomputed))
    if after.keeping != before.keeping:
        changes.append(("no_recompute_layers", "null"))
    offloads = ("offload_optimizer", "offload_param")[before.offload : after.offload]
    changes += [(f"zero_optimization.{key}.device", "cpu") for key in offloads]
    if after.attention != before.attention:
        changes.append(("attention_config", '[[["flash"], "all"]]'))
    return tuple(changes)


def flash_advice(plan: RunPlan, device: Device) -> Iterator[str]:
    """Yield what flash attention would save where a GPU's run asks for the fused softmax, which keeps all scores."""
    network = plan.architecture
    served = network.head_dim <= _FLASH_HEAD_DIM and not POSITIONS[network.positions].biases_scores
    if device.shared or plan.precision == "fp32" or not served:
        return
    if "fused" not in plan.attention or set(network.attention) != {"global"}:
        return
    fused = _setting(plan, on_cpu=False)
    flash = replace(fused, attention="flash")
    now, then, kept = (
        fullest_stage(plan.layers, plan.stages, setting).total
        for setting in (fused, flash, replace(flash, recompute=0))
    )
    sizes = f"{gib(then)} instead of {gib(now)}"
    if fused.recompute and kept <= device.usable:
        sizes += f", and {gib(kept)} without checkpoint_activations, which fits"
    yield f'attention_config: [[["flash"], "all"]] gives the same numbers, faster and without keeping scores: {sizes}'


def inference_bytes(plan: RunPlan, pp_size: int, tp_size: int) -> int:
    """Return the bytes that the fullest GPU of generation or evaluation holds at least.

    Weights, and the keys and values of new tokens are counted; prompts, which are not known, and activations are not.

    Args:
        plan: The plan of the run.
        pp_size: Number of pipeline stages.
        tp_size: Number of tensor ranks of each stage.
    """
    config = plan.config
    layers = layer_plan(config, padded_vocabulary(config, plan.vocab_size, tp_size))
    parallelism = config.parallelism
    stages = plan_stages(layers, pp_size, parallelism.pipe_partition_method, parallelism.pipeline_schedule, tp_size)
    keys = config.generation
    size = 4 if (keys.inference_precision or plan.precision) == "fp32" else 2
    sequences = keys.num_beams if keys.num_beams > 1 else keys.generation_batch_size
    network = layers.architecture
    block_cache = 2 * sequences * keys.maximum_tokens * network.attended_heads * network.head_dim // tp_size
    most = 0
    for stage in stages:
        held = 0
        for layer in stage.entries(layers):
            copies_words = layer.tied_to is not None and not stage.holds(layer.tied_to)
            held += held_parameters(layers, layer, tp_size, tied=copies_words)
            if layer.kind == "block":
                held += block_cache
        most = max(most, size * held)
    return most


def memory_problem(plan: RunPlan, device: Device, *, training: bool) -> str | None:
    """Return a message if a run does not fit on its devices, with the nearest settings that do; None if it fits."""
    if training:
        fit = check_fit(plan, device)
        return None if fit.fits else _fit_message(fit, device, plan.grid.world_size)
    needed = inference_bytes(plan, plan.grid.pp_size, plan.grid.tp_size)
    if needed <= device.usable:
        return None
    found = f"weights and cache need {_of_usable(needed, device)}: the model does not fit"
    if device.shared:
        return f"{found}; use a smaller one, more hosts, or inference_precision bf16"
    gpus = 2
    while gpus <= _MOST_GPUS:
        tp_size = min(gpus, _MOST_TENSOR_RANKS)
        while plan.architecture.num_kv_heads % tp_size:
            tp_size //= 2
        pp_size = gpus // tp_size
        if pp_size <= plan.architecture.num_layers and inference_bytes(plan, pp_size, tp_size) <= device.usable:
            degrees = f"--set model_parallel_size={tp_size} --set pipe_parallel_size={pp_size}"
            return f"{found}; it does on {gpus} of these: {degrees} --num_gpus {gpus}"
        gpus *= 2
    return f"{found}, nor on {_MOST_GPUS}; set inference_precision to bf16, or use larger ones"


def _fit_message(fit: Fit, device: Device, world: int) -> str:
    found = f"a rank needs {_of_usable(fit.needed, device)}: does not fit"
    if fit.memory_then is None:
        more = "" if device.shared else "more ranks and "
        way_out = "a smaller model, more hosts" if device.shared else "other degrees of parallelism"
        return f"{found}, nor with {more}nearby settings; use {way_out}, or more memory"
    changes = " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in fit.changes)
    more = f" on {fit.world} of these" if fit.world != world else ""
    host = (
        f" and {gib(fit.memory_then.main_memory)} of main memory"
        if fit.memory_then.main_memory and not device.shared
        else ""
    )
    then = gib(needed_bytes(fit.memory_then, device))
    return f"{found}; {then}{host}{more} with {changes or 'the same settings'}"


def _of_usable(needed: int, device: Device) -> str:
    return f"{gib(needed)} of the {gib(device.usable)} usable on {device.name}"


def gib(count: float) -> str:
    """Return a number of bytes in GiB, small ones in MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 or not count else f"{count / 2**20:.1f} MiB"
