"""Search for the fastest layouts of a run on its GPUs.

Every layout keeps the batch, so that it trains the same. Layouts are ordered by a quick estimate of their time. The
first ones that fit in memory are simulated and ordered again. A layout that adds gradients in another precision than
the configured one trains something else: those are apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from neox.config.neox_config import yaml_text
from neox.errors import ConfigError
from neox.plan.device import Device
from neox.plan.fit import memory_of_settings, nested_keys, setting_changes
from neox.plan.layouts import layouts
from neox.plan.memory import MemoryPlan, MemorySetting
from neox.plan.resolve import resolve
from neox.plan.run_plan import RunPlan
from neox.plan.time.gpus import Gpu
from neox.plan.time.of_plan import network_shape, step_setting
from neox.plan.time.setting import NetworkShape, StepSetting
from neox.plan.time.simulation import quick_length, simulated_length
from neox.plan.time.step import StepTime, estimate_step

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
        best: The fastest layouts that fit, the fastest first. They add gradients in the configured layout's precision.
        other_numerics: The same of layouts that add them in another precision.
        tried: Number of layouts that were estimated.
    """

    given: Suggestion
    given_fits: bool
    best: tuple[Suggestion, ...]
    other_numerics: tuple[Suggestion, ...]
    tried: int


def suggest_layouts(
    plan: RunPlan, device: Device, gpu: Gpu, count: int = 10, changed: Mapping[str, Any] | None = None
) -> Suggestions:
    """Search the fastest layouts of a run that fit.

    Args:
        plan: The run, whose batch, precision and kernels are kept.
        device: What a rank has of memory.
        gpu: The kind of GPU, for the time.
        count: Number of layouts to return.
        changed: Keys in which the plan differs from the user's configuration (`neox.plan.search_start`), with values.

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
    start = replace(plan.memory_setting, on_cpu=device.shared)
    before = {key: yaml_text(value) for key, value in (changed or {}).items()}

    def suggestion(setting: MemorySetting) -> Suggestion:
        changes = {**before, **dict(setting_changes(start, setting))}
        return Suggestion(setting, tuple(changes.items()), timer.exact(setting), memory(setting))

    def fits(setting: MemorySetting) -> bool:
        return memory(setting).needed(on_cpu=device.shared) <= device.usable

    def fastest(settings: Iterable[MemorySetting]) -> tuple[Suggestion, ...]:
        """Return the fastest of settings that are sorted by the quick estimate."""
        found: list[Suggestion] = []
        for setting in settings:
            if len(found) == _MARGIN * count:
                break
            if fits(setting):
                found.append(suggestion(setting))
        found.sort(key=lambda layout: layout.time.seconds)
        return tuple(islice((layout for layout in found if _is_accepted(plan, layout)), count))

    candidates = [setting for setting in layouts(plan, start) if _may_fit(shape, setting, device)]
    candidates.sort(key=timer.quick)
    best = fastest(setting for setting in candidates if setting.sums_in_bf16 == start.sums_in_bf16)
    others = fastest(setting for setting in candidates if setting.sums_in_bf16 != start.sums_in_bf16)
    return Suggestions(suggestion(start), fits(start), best, others, len(candidates))


def _is_accepted(plan: RunPlan, layout: Suggestion) -> bool:
    """Return whether no rule refuses a layout."""
    keys = nested_keys(plan.config, layout.changes)
    try:
        resolve(plan.config.updated(keys), plan.grid.world_size, plan.vocab_size)
    except ConfigError:
        return False
    return True


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


def _may_fit(shape: NetworkShape, setting: MemorySetting, device: Device) -> bool:
    """Return whether weights, gradients and states fit without activations: a cheap test before the whole estimate."""
    divided = shape.expert_parameters * (1 - 1 / setting.ep_size)
    held = (shape.parameters - divided) / setting.tp_size / setting.pp_size
    size = setting.bytes_per_number
    weights = held * size / (setting.dp_size if setting.zero_stage == 3 else 1)
    gradients = held * size / (setting.dp_size if setting.zero_stage >= 2 else 1)
    states = held * 8 / (setting.dp_size if setting.zero_stage >= 1 else 1)
    if setting.offloads_states:
        states = 0.0
    if setting.offloads_weights:
        weights = 0.0
    # The fullest stage may hold less than the mean if layers differ, so a part of the estimate is enough to refuse.
    return 0.8 * (weights + gradients + states) <= device.usable
