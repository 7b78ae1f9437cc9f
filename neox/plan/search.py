"""Search for the fastest layouts of a run on its GPUs: degrees, schedule, micro batch, ZeRO stage, recomputation.

Every layout keeps the batch, so that it trains the same. Layouts are ordered by a quick estimate of their time. The
first ones that fit in memory are simulated and ordered again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from neox.architecture import LayerPlan
from neox.errors import ConfigError
from neox.plan.architecture import layer_plan
from neox.plan.device import Device
from neox.plan.fit import memory_of_settings, setting_changes
from neox.plan.memory import MemoryPlan, MemorySetting
from neox.plan.pipeline_schedules import PIPELINE_SCHEDULES, ranges_per_stage
from neox.plan.run_plan import RunPlan
from neox.plan.time.gpus import Gpu
from neox.plan.time.of_plan import network_shape, step_setting
from neox.plan.time.setting import NetworkShape, StepSetting
from neox.plan.time.simulation import quick_length, simulated_length
from neox.plan.time.step import StepTime, estimate_step

_TENSOR_DEGREES = (1, 2, 4, 8)
_LARGEST_MICRO_BATCH = 64
_SCHEDULES = (("1f1b", None), ("interleaved", 2), ("interleaved", 4), ("dualpipev", None))
"""Values of `pipeline_schedule` and `virtual_stages` that are tried."""
_MARGIN = 3
"""Layouts that are simulated for each one that is asked for, because the quick estimate may order them wrongly."""


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits.

    Attributes:
        setting: The layout.
        changes: Keys and values in which it differs from the configuration.
        time: Estimated time of a step.
        memory: Memory of the fullest rank.
    """

    setting: MemorySetting
    changes: tuple[tuple[str, str], ...]
    time: StepTime
    memory: MemoryPlan


@dataclass(frozen=True)
class Suggestions:
    """Result of a search.

    Attributes:
        given: The configuration's own layout, whether or not it fits.
        given_fits: Whether it fits.
        best: The fastest layouts that fit, the fastest first.
        tried: Number of layouts that were estimated.
    """

    given: Suggestion
    given_fits: bool
    best: tuple[Suggestion, ...]
    tried: int


def suggest_layouts(plan: RunPlan, device: Device, gpu: Gpu, count: int = 10) -> Suggestions:
    """Search the fastest layouts of a run that fit.

    Args:
        plan: The run, whose batch, precision and kernels are kept.
        device: What a rank has of memory.
        gpu: The kind of GPU, for the time.
        count: Number of layouts to return.

    Raises:
        ConfigError: The time of this kind of network is not estimated.
    """
    shape = network_shape(plan.layers)
    if shape is None:
        raise ConfigError(
            "--suggest estimates decoders with attention in each block only; this network is another kind"
        )
    timer = _Timer(plan, shape, gpu)
    memory = memory_of_settings(plan)
    start = plan.memory_setting

    def suggestion(setting: MemorySetting) -> Suggestion:
        changes = setting_changes(start, setting)
        return Suggestion(setting, changes, timer.exact(setting), memory(setting))

    def fits(setting: MemorySetting) -> bool:
        return memory(setting).needed(on_cpu=device.shared) <= device.usable

    candidates = [setting for setting in _layouts(plan) if _may_fit(shape, setting, device)]
    candidates.sort(key=timer.quick)
    found: list[Suggestion] = []
    for setting in candidates:
        if len(found) == _MARGIN * count:
            break
        if fits(setting):
            found.append(suggestion(setting))
    found.sort(key=lambda layout: layout.time.seconds)
    return Suggestions(suggestion(start), fits(start), tuple(found[:count]), len(candidates))


class _Timer:
    """Estimates the time of a step for one network on one kind of GPU.

    Args:
        plan: The run.
        shape: Its network.
        gpu: The kind of GPU.
    """

    def __init__(self, plan: RunPlan, shape: NetworkShape, gpu: Gpu) -> None:
        self._shape = shape
        self._gpu = gpu
        self._config = plan.config

    def exact(self, setting: MemorySetting) -> StepTime:
        """Return the estimate with a simulation of the pipeline."""
        return estimate_step(self._shape, self._step(setting), self._gpu, simulated_length)

    def _step(self, setting: MemorySetting) -> StepSetting:
        return step_setting(setting, self._config)

    def quick(self, setting: MemorySetting) -> float:
        """Return about the seconds of a step."""
        timed = estimate_step(self._shape, self._step(setting), self._gpu, quick_length)
        return timed.seconds


def _layouts(plan: RunPlan) -> Iterator[MemorySetting]:
    """Yield every layout of the run's GPUs that keeps its batch and that the engine can run."""
    start = plan.memory_setting
    world = plan.grid.world_size
    for tp_size in _tensor_degrees(plan):
        for pp_size in range(1, plan.architecture.num_layers + 1):
            if world % (tp_size * pp_size):
                continue
            dp_size = world // (tp_size * pp_size)
            if plan.batch.train_batch_size % dp_size or dp_size % start.ep_size:
                continue
            layout = replace(start, tp_size=tp_size, pp_size=pp_size, dp_size=dp_size)
            for batched in _micro_batches(layout, plan.batch.train_batch_size // dp_size):
                for scheduled in _schedules(batched, plan):
                    yield from filter(_can_divide_experts, _memory_choices(scheduled))


def _tensor_degrees(plan: RunPlan) -> Iterator[int]:
    """Yield the tensor degrees that divide every parameter."""
    for tp_size in _TENSOR_DEGREES:
        layers: LayerPlan = layer_plan(plan.config, plan.vocab_size, tp_size)
        if all(parameter.is_divisible(tp_size) for layer in layers for parameter in layer.parameters):
            yield tp_size


def _micro_batches(layout: MemorySetting, samples: int) -> Iterator[MemorySetting]:
    """Yield the ways to cut a data rank's samples into micro batches."""
    for size in range(1, min(samples, _LARGEST_MICRO_BATCH) + 1):
        if samples % size == 0:
            yield replace(layout, micro_batch_size=size, accumulation_steps=samples // size)


def _schedules(layout: MemorySetting, plan: RunPlan) -> Iterator[MemorySetting]:
    """Yield the pipeline schedules of a layout; the configuration's own if there are no stages or another division."""
    if layout.pp_size == 1 or not _divides_blocks(plan):
        yield layout
        return
    for name, virtual_stages in _SCHEDULES:
        schedule = PIPELINE_SCHEDULES[name]
        ranges = ranges_per_stage(name, layout.pp_size, virtual_stages)
        is_deep_enough = layout.pp_size * ranges <= plan.architecture.num_layers
        if is_deep_enough and layout.accumulation_steps >= schedule.least_micro_batches(layout.pp_size):
            yield replace(layout, pipeline_schedule=name, virtual_stages=virtual_stages)


def _divides_blocks(plan: RunPlan) -> bool:
    """Return whether layers are divided by their blocks, so that each range has some."""
    return plan.config.parallelism.pipe_partition_method.startswith("type:transformer")


def _can_divide_experts(layout: MemorySetting) -> bool:
    """Return whether the engine can divide experts as the configuration asks (`neox.plan.rules.experts`)."""
    if layout.ep_size == 1:
        return True
    if layout.precision == "bf16" and (layout.pp_size > 1 or layout.zero_stage == 1):
        return False
    return layout.zero_stage < 3


def _memory_choices(layout: MemorySetting) -> Iterator[MemorySetting]:
    """Yield ZeRO stages, recomputation and sequence parallelism of a layout."""
    stages = (0, 1) if layout.pp_size > 1 else (0, 1, 2, 3)
    for stage in stages:
        for chunk in (0, 1):
            for divides in _sequence_parallel_choices(layout):
                yield replace(
                    layout,
                    zero_stage=stage,
                    fp32_gradients=layout.precision == "bf16" and stage > 0,
                    recompute_chunk=chunk,
                    recomputed_part="full",
                    no_recompute_blocks=(),
                    sequence_parallel=divides,
                )


def _sequence_parallel_choices(layout: MemorySetting) -> tuple[bool, ...]:
    if layout.tp_size == 1 or layout.sequence_length % layout.tp_size:
        return (False,)
    return (False, True)


def _may_fit(shape: NetworkShape, setting: MemorySetting, device: Device) -> bool:
    """Return whether weights, gradients and states fit without activations: a cheap test before the whole estimate."""
    held = shape.parameters / setting.tp_size / setting.pp_size
    size = setting.bytes_per_number
    weights = held * size / (setting.dp_size if setting.zero_stage == 3 else 1)
    gradients = held * size / (setting.dp_size if setting.zero_stage >= 2 else 1)
    states = held * 8 / (setting.dp_size if setting.zero_stage >= 1 else 1)
    # The fullest stage may hold less than the mean if layers differ, so a part of the estimate is enough to refuse.
    return 0.8 * (weights + gradients + states) <= device.usable
