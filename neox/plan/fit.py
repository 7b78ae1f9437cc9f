"""Comparison of a run's memory with its devices, and search for the nearest settings that fit."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import yaml

from neox.architecture import POSITIONS, LayerPlan
from neox.config.neox_config import NeoXConfig
from neox.config.sections.deepspeed import DeepSpeedConfig
from neox.plan.architecture import layer_plan
from neox.plan.device import Device, gib, memory_on
from neox.plan.inference import inference_bytes
from neox.plan.memory import MemoryPlan, MemorySetting, at_zero_stage, fullest_stage
from neox.plan.pipeline_schedules import ranges_per_stage
from neox.plan.run_plan import RunPlan
from neox.plan.stages import Division, StagePlan, plan_stages

# Largest heads that torch's flash kernels serve.
_FLASH_HEAD_DIM = 256
# Limits of the search: changes in a row, settings in all, and devices beyond those of the run.
_MOST_CHANGES = 6
_MOST_TRIED = 300
_MOST_GROWTH = 64
_MOST_GPUS = 64
_MOST_TENSOR_RANKS = 8  # tensor ranks communicate within each layer, and a host seldom has more GPUs


@dataclass(frozen=True)
class Limits:
    """What a run's network and keys allow the search.

    Attributes:
        num_layers: Blocks, which limit pipeline stages.
        num_kv_heads: Heads of keys, which tensor ranks divide.
        may_divide_tokens: Whether no other key forbids `sequence_parallel`.
        deepspeed: DeepSpeed's keys, whose meaning depends on the ZeRO stage.
        may_offload: Whether states may move to main memory, which is slow.
    """

    num_layers: int
    num_kv_heads: int
    may_divide_tokens: bool
    deepspeed: DeepSpeedConfig
    may_offload: bool = True


@dataclass(frozen=True)
class Fit:
    """Result of a comparison.

    Attributes:
        fits: Whether the run fits.
        needed: Bytes of the fullest rank.
        world: Number of devices on which the changed settings fit.
        changes: Keys and values that fit; none if the run fits or nothing was found.
        memory_then: Memory with these changes.
    """

    fits: bool
    needed: int
    world: int
    changes: tuple[tuple[str, str], ...] = ()
    memory_then: MemoryPlan | None = None


def check_fit(plan: RunPlan, device: Device) -> Fit:
    """Compare the fullest rank of a training with the bytes that its device leaves to it.

    If it does not fit, search the nearest settings that do: on these devices, then on 2, 4, ... 64 times as many.
    """
    world = plan.grid.world_size
    needed = memory_on(plan, device).needed(on_cpu=device.shared)
    if needed <= device.usable:
        return Fit(True, needed, world)

    memory = memory_of_settings(plan)

    def fits(setting: MemorySetting) -> bool:
        return memory(setting).needed(on_cpu=device.shared) <= device.usable

    start = replace(plan.memory_setting, on_cpu=device.shared)
    limits = limits_of(plan)
    growth = 1
    while growth <= (1 if device.shared else _MOST_GROWTH):
        wider = replace(
            start, dp_size=start.dp_size * growth, accumulation_steps=max(1, start.accumulation_steps // growth)
        )
        quick = replace(limits, may_offload=False)
        found = nearest_setting(wider, quick, fits, moves) or nearest_setting(wider, limits, fits, moves)
        if found is not None:
            return Fit(False, needed, world * growth, setting_changes(start, found), memory(found))
        growth *= 2
    return Fit(False, needed, world)


def memory_of_settings(plan: RunPlan) -> Callable[[MemorySetting], MemoryPlan]:
    """Return a function of a setting to the memory of its fullest rank, which remembers what it has computed."""
    method = plan.config.parallelism.pipe_partition_method

    @cache
    def layers(tp_size: int) -> LayerPlan:  # the vocabulary's padding depends on the degree
        return layer_plan(plan.config, plan.vocab_size, tp_size)

    @cache
    def stages(pp_size: int, tp_size: int, division: Division) -> tuple[StagePlan, ...]:
        return plan_stages(layers(tp_size), pp_size, division, tp_size)

    @cache
    def memory(setting: MemorySetting) -> MemoryPlan:
        division = Division(method, setting.pipeline_schedule, setting.virtual_stages)
        return fullest_stage(layers(setting.tp_size), stages(setting.pp_size, setting.tp_size, division), setting)

    return memory


Moves = Callable[[MemorySetting, Limits], Iterator[MemorySetting]]
"""Function that yields the settings one step away from a setting, within the limits of the run."""


def limits_of(plan: RunPlan) -> Limits:
    """Return the limits of the search for a run."""
    network = plan.architecture
    curriculum = plan.config.schedule.curriculum_learning
    changes_lengths = curriculum is not None and curriculum.enabled
    divides_inputs = plan.config.training.partition_activations
    may_divide = not changes_lengths and not divides_inputs and not network.soft_prompt_tokens
    return Limits(network.num_layers, network.num_kv_heads, may_divide, plan.config.deepspeed)


def nearest_setting(
    start: MemorySetting, limits: Limits, fits: Callable[[MemorySetting], bool], propose: Moves
) -> MemorySetting | None:
    """Return the setting that fits after the fewest moves; None if none fits within a maximum number of moves.

    Args:
        start: The first setting.
        limits: Limits of the run.
        fits: Whether a setting fits in memory.
        propose: Function that yields the settings one move away.
    """
    if fits(start):
        return start
    tried = {start}
    frontier = [start]
    for _ in range(_MOST_CHANGES):
        following: list[MemorySetting] = []
        for setting in frontier:
            for candidate in propose(setting, limits):
                if candidate in tried or len(tried) >= _MOST_TRIED:
                    continue
                if fits(candidate):
                    return candidate
                tried.add(candidate)
                following.append(candidate)
        frontier = following
    return None


def moves(setting: MemorySetting, limits: Limits) -> Iterator[MemorySetting]:
    """Yield settings one step away that need less memory, cheapest in speed first; the batch stays the same."""
    if setting.zero_stage == 0:
        yield at_zero_stage(setting, 1, limits.deepspeed)
    if setting.attention != "flash":
        yield replace(setting, attention="flash")
    if setting.micro_batch_size % 2 == 0:
        yield replace(
            setting,
            micro_batch_size=setting.micro_batch_size // 2,
            accumulation_steps=setting.accumulation_steps * 2,
        )
    if not setting.recompute_chunk and setting.activation_budget == 1.0:  # a budget chooses what is recomputed
        yield replace(setting, recompute_chunk=1)
    elif setting.recomputed_part != "full" or setting.no_recompute_blocks:
        yield replace(setting, recomputed_part="full", no_recompute_blocks=())
    if setting.pp_size == 1 and setting.zero_stage in (1, 2) and setting.dp_size > 1:
        yield at_zero_stage(setting, setting.zero_stage + 1, limits.deepspeed)
    if setting.dp_size % (2 * math.lcm(setting.hpz_size, setting.cp_size)) == 0:
        yield from _more_model_parallel(setting, limits)
    if setting.tp_size > 1 and _can_divide_tokens(setting, setting.tp_size, limits):
        yield replace(setting, sequence_parallel=True)
    if limits.may_offload:
        yield from _offload_moves(setting, limits)


def _more_model_parallel(setting: MemorySetting, limits: Limits) -> Iterator[MemorySetting]:
    """Yield settings with twice the tensor ranks or pipeline stages, and half of the data ranks.

    Tensor ranks also come with divided tokens, which cost more communication and less memory.
    """
    fewer = replace(setting, dp_size=setting.dp_size // 2, accumulation_steps=setting.accumulation_steps * 2)
    tensor_ranks = setting.tp_size * 2
    divides_tokens = not setting.sequence_parallel or setting.sequence_length % tensor_ranks == 0
    if limits.num_kv_heads % tensor_ranks == 0 and tensor_ranks <= _MOST_TENSOR_RANKS and divides_tokens:
        yield replace(fewer, tp_size=tensor_ranks)
        if _can_divide_tokens(setting, tensor_ranks, limits):
            yield replace(fewer, tp_size=tensor_ranks, sequence_parallel=True)
    ranges = ranges_per_stage(setting.pipeline_schedule, 2 * setting.pp_size, setting.virtual_stages)
    if setting.zero_stage <= 1 and setting.pp_size * 2 * ranges <= limits.num_layers:
        yield replace(fewer, pp_size=setting.pp_size * 2)


def _can_divide_tokens(setting: MemorySetting, tensor_ranks: int, limits: Limits) -> bool:
    """Return whether this many tensor ranks can start to divide the tokens of a sample."""
    is_free = limits.may_divide_tokens and not setting.sequence_parallel
    return is_free and setting.sequence_length % tensor_ranks == 0


def _offload_moves(setting: MemorySetting, limits: Limits) -> Iterator[MemorySetting]:
    """Yield settings that offload more. They are slow, because states cross the bus at each step."""
    if setting.zero_stage == 0:
        return
    if not setting.offloads_states:
        if not setting.on_cpu:
            yield replace(setting, offloads_states=True)
        return
    if setting.zero_stage in (1, 2) and setting.pp_size == 1:
        yield at_zero_stage(setting, setting.zero_stage + 1, limits.deepspeed)
    if setting.zero_stage == 3 and not setting.offloads_weights:
        yield replace(setting, offloads_weights=True)


_KEYS_OF_SETTING = (
    ("pp_size", "pipe_parallel_size"),
    ("tp_size", "model_parallel_size"),
    ("cp_size", "context_parallel_size"),
    ("ep_size", "expert_model_parallel_size"),
    ("pipeline_schedule", "pipeline_schedule"),
    ("zero_stage", "zero_optimization.stage"),
    ("micro_batch_size", "train_micro_batch_size_per_gpu"),
    ("accumulation_steps", "gradient_accumulation_steps"),
    ("virtual_stages", "virtual_stages"),
    ("sequence_parallel", "sequence_parallel"),
    ("tile_tokens", "mlp_tile_size"),
    ("kept_inputs_on_cpu", "checkpoint_in_cpu"),
)
"""Fields of a setting that are values of keys."""


def setting_changes(before: MemorySetting, after: MemorySetting) -> tuple[tuple[str, str], ...]:
    """Name the keys that differ, and their new values."""
    changes = []
    for name, key in _KEYS_OF_SETTING:
        value = getattr(after, name)
        if value != getattr(before, name):
            changes.append((key, json.dumps(value).strip('"')))
    if after.recompute_chunk != before.recompute_chunk:
        changes.append(("checkpoint_activations", str(after.recompute_chunk > 0).lower()))
    if after.recompute_chunk and after.recomputed_part != before.recomputed_part:
        changes.append(("recompute_granularity", after.recomputed_part))
    if after.recompute_chunk and after.no_recompute_blocks != before.no_recompute_blocks:
        changes.append(("no_recompute_layers", "null"))
    if after.hpz_size != before.hpz_size:
        copies = "null" if after.hpz_size == 1 else str(after.hpz_size)
        changes.append(("zero_optimization.zero_hpz_partition_size", copies))
    if after.attention != before.attention:
        changes.append(("attention_config", '[[["flash"], "all"]]'))
    return (*changes, *_offload_changes(before, after))


def nested_keys(config: NeoXConfig, changes: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return changes as nested keys. A changed block includes its other keys from the configuration.

    Args:
        config: The configuration.
        changes: Dotted keys, and their values as YAML text.
    """
    given = config.to_flat()
    keys: dict[str, Any] = {}
    for dotted, text in changes:
        *blocks, last = dotted.split(".")
        block = keys
        former = given
        for name in blocks:
            former = former.get(name) or {}
            block = block.setdefault(name, dict(former))
        block[last] = yaml.safe_load(text)
    return keys


def _offload_changes(before: MemorySetting, after: MemorySetting) -> Iterator[tuple[str, str]]:
    """Yield the keys that turn offloading on or off."""
    if before.offloads_states and not after.offloads_states:
        yield "zero_optimization.offload_optimizer.device", "none"
    if before.offloads_weights and not after.offloads_weights:
        yield "zero_optimization.offload_param.device", "none"
    if after.offloads_states and not before.offloads_states:
        yield "zero_optimization.offload_optimizer.device", "cpu"
    if after.offloads_weights and not before.offloads_weights:
        yield "zero_optimization.offload_param.device", "cpu"


def flash_advice(plan: RunPlan, device: Device) -> Iterator[str]:
    """Yield what flash attention would save if a GPU's run asks for the fused softmax, which keeps all scores."""
    network = plan.architecture
    is_served = network.head_dim <= _FLASH_HEAD_DIM and not POSITIONS[network.positions].biases_scores
    if device.shared or plan.precision == "fp32" or not is_served:
        return
    if "fused" not in plan.attention or set(network.attention) != {"global"}:
        return

    def total(setting: MemorySetting) -> int:
        return fullest_stage(plan.layers, plan.stages, setting).total

    fused = plan.memory_setting
    flash = replace(fused, attention="flash")
    with_flash = gib(total(flash))
    with_fused = gib(total(fused))
    sizes = []
    if with_flash != with_fused:
        sizes.append(f"{with_flash} instead of {with_fused}")
    if fused.recompute_chunk:
        without_recompute = total(replace(flash, recompute_chunk=0))
        if without_recompute <= device.usable:
            sizes.append(f"{gib(without_recompute)} without checkpoint_activations, which fits")
    if not sizes:  # it saves nothing
        return
    saved = ", and ".join(sizes)
    yield f'attention_config: [[["flash"], "all"]] gives the same numbers, faster and without keeping scores: {saved}'


def memory_problem(plan: RunPlan, device: Device, *, training: bool) -> str | None:
    """Return a message if a run does not fit on its devices, with the nearest settings that do; None if it fits."""
    if not training:
        return _inference_problem(plan, device)
    fit = check_fit(plan, device)
    return None if fit.fits else _fit_message(fit, device, plan.grid.world_size)


def _inference_problem(plan: RunPlan, device: Device) -> str | None:
    """Return a message if a model does not fit on its devices to be run."""
    needed = inference_bytes(plan, plan.grid.pp_size, plan.grid.tp_size)
    if needed <= device.usable:
        return None
    problem = f"weights and cache need {_of_usable(needed, device)}: the model does not fit"
    if device.shared:
        return f"{problem}; use a smaller one, more hosts, or inference_precision bf16"
    gpus = 2
    while gpus <= _MOST_GPUS:
        tp_size = min(gpus, _MOST_TENSOR_RANKS)
        while plan.architecture.num_kv_heads % tp_size:
            tp_size //= 2
        pp_size = gpus // tp_size
        if pp_size <= plan.architecture.num_layers and inference_bytes(plan, pp_size, tp_size) <= device.usable:
            degrees = f"--set model_parallel_size={tp_size} --set pipe_parallel_size={pp_size}"
            return f"{problem}; it does on {gpus} of these: {degrees} --num_gpus {gpus}"
        gpus *= 2
    return f"{problem}, nor on {_MOST_GPUS}; set inference_precision to bf16, or use larger ones"


def _fit_message(fit: Fit, device: Device, world: int) -> str:
    """Return why a run does not fit, and the settings that do."""
    problem = f"a rank needs {_of_usable(fit.needed, device)}: does not fit"
    if fit.memory_then is None:
        if device.shared:
            return f"{problem}, nor with nearby settings; use a smaller model, more hosts, or more memory"
        return f"{problem}, nor with more ranks and nearby settings; use other degrees of parallelism, or more memory"
    then = gib(fit.memory_then.needed(on_cpu=device.shared))
    if fit.memory_then.main_memory and not device.shared:
        then += f" and {gib(fit.memory_then.main_memory)} of main memory"
    if fit.world != world:
        then += f" on {fit.world} of these"
    return f"{problem}; {then} with {settings_text(fit.changes)}"


def settings_text(changes: tuple[tuple[str, str], ...]) -> str:
    """Return changed keys and values as command line flags."""
    typed = " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in changes)
    return typed or "the same settings"


def _of_usable(needed: int, device: Device) -> str:
    return f"{gib(needed)} of the {gib(device.usable)} usable on {device.name}"
