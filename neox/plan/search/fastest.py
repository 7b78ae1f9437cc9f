"""Search for the fastest layouts of a run on its GPUs.

Every layout keeps the batch, so that it trains the same. A layout passes these tests in order, and is rejected by the
first one that it fails:

    1. `layouts` yields it: degrees divide ranks, batch and parameters, and the engine has the combination.
    2. `_may_fit`: weights, gradients and states fit, by a rough estimate.
    3. Layouts are ordered by a quick estimate of their time; the first ones that fit in memory, on the device and with
       what they offload in its share of main memory, are simulated.
    4. No rule refuses the configuration with the layout's keys, and its plan fits, too. What is reported of the layout
       is computed from that plan.

A layout that adds gradients in another precision than the configured one trains something else: those are apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from neox.config.neox_config import yaml_text
from neox.devices import Gpu
from neox.errors import ConfigError
from neox.plan.devices.device import Device, memory_on
from neox.plan.layout import Layout, Workload
from neox.plan.memory import MemoryPlan
from neox.plan.resolve import resolve
from neox.plan.run_plan import RunPlan
from neox.plan.search.candidates import layouts
from neox.plan.search.fit import LayoutMemory, nested_keys
from neox.plan.time.simulation import PipelineLength, quick_length, simulated_length
from neox.plan.time.step import StepTime, estimate_step, unsupported_network, unsupported_time

_MARGIN = 3
"""Layouts that are simulated for each one that is asked for, because the quick estimate may order them wrongly."""


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits.

    Attributes:
        run: The run in this layout.
        changes: Keys and values in which it differs from the configuration.
        time: Estimated time of a step.
        memory: Memory of the fullest rank.
    """

    run: Workload
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
        least_offloaded: Of layouts that would be as fast, but offload more than main memory holds, the least bytes of
            it that a rank needs; None if there are none.
    """

    given: Suggestion
    given_fits: bool
    best: tuple[Suggestion, ...]
    other_numerics: tuple[Suggestion, ...]
    tried: int
    least_offloaded: int | None = None


def suggest_layouts(
    plan: RunPlan,
    device: Device,
    gpu: Gpu,
    count: int = 10,
    changed: Mapping[str, Any] | None = None,
    *,
    measured: bool = False,
) -> Suggestions:
    """Search the fastest layouts of a run that fit.

    Args:
        plan: The run, whose batch, precision and kernels are kept.
        device: What a rank has of memory.
        gpu: The kind of GPU, for the time.
        count: Number of layouts to return.
        changed: Keys in which the plan differs from the user's configuration (see `divisible.py`), with values.
        measured: Whether the layouts will be run, so that their order counts and not their time: also in fp32.

    Raises:
        ConfigError: The time of this kind of run is not estimated.
    """
    reason = unsupported_network(plan.architecture) if measured else unsupported_time(plan.workload_on(device.family))
    if reason:
        raise ConfigError(f"there is no estimate: {reason}")
    memory = LayoutMemory(plan, device)
    offloaded: list[int] = []  # bytes of main memory of layouts that lack some

    def seconds(layout: Layout, pipeline_length: PipelineLength) -> float:
        return estimate_step(memory.workload(layout), gpu, pipeline_length).seconds

    def suggestion(of: RunPlan) -> Suggestion:
        """Return what is to be told of a plan: the keys in which it differs from the configuration, time and memory."""
        run = of.workload_on(device.family)
        changes = {key: yaml_text(value) for key, value in (changed or {}).items()}
        changes |= dict(of.layout.keys_changed_from(plan.layout))
        time = estimate_step(run, gpu)
        return Suggestion(run, tuple(changes.items()), time, memory_on(of, device))

    def fastest(candidates: Iterable[Layout]) -> tuple[Suggestion, ...]:
        """Return the fastest of layouts that are sorted by the quick estimate."""
        fitting: list[Layout] = []
        for layout in candidates:
            if len(fitting) == _MARGIN * count:
                break
            if memory.fits(layout):
                fitting.append(layout)
            elif memory.lacks_main_memory(layout):
                offloaded.append(memory.of(layout).host)
        fitting.sort(key=lambda layout: (seconds(layout, simulated_length), memory.of(layout).total))
        accepted: list[Suggestion] = []
        for layout in fitting:
            if len(accepted) == count:
                break
            keys = nested_keys(plan.config, layout.keys_changed_from(plan.layout))
            try:
                of_layout = resolve(plan.config.updated(keys), plan.grid.world_size, plan.vocab_size)
            except ConfigError:  # a rule refuses it
                continue
            found = suggestion(of_layout)
            if device.holds(found.memory):
                accepted.append(found)
        return tuple(accepted)

    candidates = []
    for layout in layouts(plan, on_cpu=device.shared):
        if _may_fit(memory.workload(layout), device):
            candidates.append(layout)
    candidates.sort(key=lambda layout: seconds(layout, quick_length))
    alike: list[Layout] = []
    others: list[Layout] = []
    for layout in candidates:
        if memory.workload(layout).sums_in_bf16 == plan.workload.sums_in_bf16:
            alike.append(layout)
        else:
            others.append(layout)
    best = fastest(alike)
    least_offloaded = min(offloaded, default=None)
    return Suggestions(
        given=suggestion(plan),
        given_fits=memory.fits(plan.layout),
        best=best,
        other_numerics=fastest(others),
        tried=len(candidates),
        least_offloaded=least_offloaded,
    )


def _may_fit(run: Workload, device: Device) -> bool:
    """Return whether weights, gradients and states fit without activations: a cheap test before the whole estimate."""
    layout = run.layout
    tables = 1 if run.network.tie_word_embeddings else 2
    parameters = run.layers.block_matrix_numel + tables * run.layers.padded_vocab_size * run.network.hidden_size
    divided = run.layers.expert_numel * (1 - 1 / layout.ep_size)
    held = (parameters - divided) / layout.tp_size / layout.pp_size
    weights = held * run.bytes_per_number
    trained = held * run.layers.trained_share
    gradients = trained * run.bytes_per_number
    states = trained * 8
    if layout.zero_stage == 3:
        weights /= layout.dp_size
    if layout.zero_stage >= 2:
        gradients /= layout.dp_size
    if layout.zero_stage >= 1:
        states /= layout.dp_size
    if layout.offloads_states:
        states = 0.0
    if layout.offloads_weights:
        weights = 0.0
    # The fullest stage may hold less than the mean if layers differ, so a part of the estimate is enough to refuse.
    return 0.8 * (weights + gradients + states) <= device.usable
