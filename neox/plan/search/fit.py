"""Comparison of a run's memory with its devices, and search for the nearest layouts that fit."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import yaml

from neox.architecture import POSITIONS, LayerPlan
from neox.config.neox_config import NeoXConfig
from neox.plan.devices.device import Device, gib, hosts_hold, memory_on
from neox.plan.layout import Layout, Workload
from neox.plan.memory import MemoryPlan, fullest_stage
from neox.plan.memory.inference import inference_bytes
from neox.plan.network.architecture import layer_plan
from neox.plan.ranks.pipeline_schedules import ranges_per_stage
from neox.plan.ranks.stages import Division, StagePlan, plan_stages
from neox.plan.run_plan import RunPlan

FLASH_IS_FASTER = 'attention_config: [[["flash"], "all"]] gives the same numbers, faster and without keeping scores'
"""Advice to a run that asks for the fused softmax."""
# Largest heads that torch's flash kernels serve.
_FLASH_HEAD_DIM = 256
# Limits of the search: changes in a row, settings in all, and devices beyond those of the run.
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
        memory: Memory of the fullest rank.
        world: Number of devices on which the changed settings fit.
        changes: Keys and values that fit; none if the run fits or nothing was found.
        memory_then: Memory with these changes.
    """

    fits: bool
    memory: MemoryPlan
    world: int
    changes: tuple[tuple[str, str], ...] = ()
    memory_then: MemoryPlan | None = None


def check_fit(plan: RunPlan, device: Device) -> Fit:
    """Compare the fullest rank of a training with the bytes that its device, and its host's main memory, leave to it.

    If it does not fit, search the nearest settings that do: on these devices, then on 2, 4, ... 64 times as many.
    """
    world = plan.grid.world_size
    needed = memory_on(plan, device)
    fits = device.holds(needed)
    if device.main_memory is not None and device.lacks_main_memory(needed):
        fits = hosts_hold(plan, device.main_memory)
    if fits:
        return Fit(True, needed, world)

    memory = LayoutMemory(plan, device)
    growth = 1
    while growth <= (1 if device.shared else _MOST_GROWTH):
        wider = wider_layout(plan.layout, growth)
        found = nearest_layout(wider, memory, smaller_layouts)
        if found is None:
            found = nearest_layout(wider, memory, smaller_or_offloading_layouts)
        if found is not None:
            return Fit(False, needed, world * growth, found.keys_changed_from(plan.layout), memory.of(found))
        growth *= 2
    return Fit(False, needed, world)


class LayoutMemory:
    """Memory of a run in other layouts than its own. Remembers what it has computed.

    Args:
        plan: The run.
        device: What a rank runs on.
    """

    def __init__(self, plan: RunPlan, device: Device) -> None:
        self._plan = plan
        self._device = device
        self._layers: dict[int, LayerPlan] = {}
        self._stages: dict[tuple[int, int, str, int | None], tuple[StagePlan, ...]] = {}
        self._memories: dict[Layout, MemoryPlan] = {}

    def workload(self, layout: Layout) -> Workload:
        """Return the run in a layout. The padding of its vocabulary depends on the tensor ranks."""
        layers = self._layers.get(layout.tp_size)
        if layers is None:
            layers = layer_plan(self._plan.config, self._plan.vocab_size, layout.tp_size)
            self._layers[layout.tp_size] = layers
        return Workload(
            config=self._plan.config,
            layers=layers,
            precision=self._plan.precision,
            layout=layout,
            family=self._device.family,
        )

    def of(self, layout: Layout) -> MemoryPlan:
        """Return the memory of the fullest rank in a layout."""
        if layout not in self._memories:
            run = self.workload(layout)
            divided_by = (layout.pp_size, layout.tp_size, layout.pipeline_schedule, layout.virtual_stages)
            if divided_by not in self._stages:
                method = self._plan.config.parallelism.pipe_partition_method
                division = Division(method, layout.pipeline_schedule, layout.virtual_stages)
                self._stages[divided_by] = plan_stages(run.layers, layout.pp_size, division, layout.tp_size)
            self._memories[layout] = fullest_stage(run, self._stages[divided_by])
        return self._memories[layout]

    def fits(self, layout: Layout) -> bool:
        """Return whether a layout fits on the device, and what it offloads in main memory."""
        return self._device.holds(self.of(layout))

    def lacks_main_memory(self, layout: Layout) -> bool:
        """Return whether a layout would fit if a rank had more main memory for what it offloads."""
        return self._device.lacks_main_memory(self.of(layout))


Proposals = Callable[[Workload], Iterator[Layout]]
"""Function that yields the layouts one step away from that of a run."""


def wider_layout(layout: Layout, growth: int) -> Layout:
    """Return a layout on `growth` times as many devices: more data ranks, and as many fewer accumulation steps."""
    return replace(
        layout, dp_size=layout.dp_size * growth, accumulation_steps=max(1, layout.accumulation_steps // growth)
    )


def nearest_layout(start: Layout, memory: LayoutMemory, propose: Proposals) -> Layout | None:
    """Return the layout that fits after the fewest steps from a start; None if none fits within a number of steps.

    Args:
        start: The first layout.
        memory: Memory of layouts.
        propose: Function that yields the layouts one step away.
    """
    if memory.fits(start):
        return start
    tried = {start}
    frontier = [start]
    for _ in range(_MOST_CHANGES):
        following: list[Layout] = []
        for layout in frontier:
            for candidate in propose(memory.workload(layout)):
                if candidate in tried or len(tried) >= _MOST_TRIED:
                    continue
                if memory.fits(candidate):
                    return candidate
                tried.add(candidate)
                following.append(candidate)
        frontier = following
    return None


def smaller_layouts(run: Workload) -> Iterator[Layout]:
    """Yield layouts one step away that need less memory, cheapest in speed first; the batch stays the same."""
    layout = run.layout
    if layout.zero_stage == 0:
        yield replace(layout, zero_stage=1)
    if layout.attention != "flash":
        yield replace(layout, attention="flash")
    if layout.micro_batch_size % 2 == 0:
        yield replace(
            layout, micro_batch_size=layout.micro_batch_size // 2, accumulation_steps=layout.accumulation_steps * 2
        )

    has_budget = run.config.training.activation_memory_budget not in (None, 1.0)  # it chooses what is recomputed
    if not layout.recomputes and not has_budget:
        yield replace(layout, recomputes=True)
    elif layout.recomputed_part != "full" or layout.no_recompute_blocks:
        yield replace(layout, recomputed_part="full", no_recompute_blocks=())

    if layout.pp_size == 1 and layout.zero_stage in (1, 2) and layout.dp_size > 1:
        yield replace(layout, zero_stage=layout.zero_stage + 1)
    if layout.dp_size % (2 * math.lcm(layout.hpz_size, layout.cp_size)) == 0:
        yield from _more_model_parallel(run)
    if layout.tp_size > 1 and _can_divide_tokens(run, layout.tp_size):
        yield replace(layout, sequence_parallel=True)


def smaller_or_offloading_layouts(run: Workload) -> Iterator[Layout]:
    """Yield `smaller_layouts`, and then those that offload more: slow, because states cross the bus at each step."""
    yield from smaller_layouts(run)
    layout = run.layout
    if layout.zero_stage == 0:
        return
    if not layout.offloads_states:
        if not run.on_cpu:
            yield replace(layout, offloads_states=True)
        return
    if layout.zero_stage in (1, 2) and layout.pp_size == 1:
        yield replace(layout, zero_stage=layout.zero_stage + 1)
    if layout.zero_stage == 3 and not layout.offloads_weights:
        yield replace(layout, offloads_weights=True)


def _more_model_parallel(run: Workload) -> Iterator[Layout]:
    """Yield layouts with twice the tensor ranks or pipeline stages, and half of the data ranks.

    Tensor ranks also come with divided tokens, which cost more communication and less memory.
    """
    layout = run.layout
    network = run.network
    fewer = replace(layout, dp_size=layout.dp_size // 2, accumulation_steps=layout.accumulation_steps * 2)
    tensor_ranks = layout.tp_size * 2
    divides_tokens = not layout.sequence_parallel or run.sequence_length % tensor_ranks == 0
    if network.num_kv_heads % tensor_ranks == 0 and tensor_ranks <= _MOST_TENSOR_RANKS and divides_tokens:
        yield replace(fewer, tp_size=tensor_ranks)
        if _can_divide_tokens(run, tensor_ranks):
            yield replace(fewer, tp_size=tensor_ranks, sequence_parallel=True)
    ranges = ranges_per_stage(layout.pipeline_schedule, 2 * layout.pp_size, layout.virtual_stages)
    if layout.zero_stage <= 1 and layout.pp_size * 2 * ranges <= network.num_layers:
        yield replace(fewer, pp_size=layout.pp_size * 2)


def _can_divide_tokens(run: Workload, tensor_ranks: int) -> bool:
    """Return whether this many tensor ranks can start to divide the tokens of a sample: no other key forbids it."""
    curriculum = run.config.schedule.curriculum_learning
    if curriculum is not None and curriculum.enabled:  # lengths change
        return False
    if run.config.training.partition_activations or run.network.soft_prompt_tokens:
        return False
    return not run.layout.sequence_parallel and run.sequence_length % tensor_ranks == 0


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


def flash_advice(plan: RunPlan, device: Device) -> Iterator[str]:
    """Yield what memory flash attention would save if a GPU's run asks for the fused softmax, which keeps all scores.

    Yields nothing if it saves none.
    """
    if not flash_is_faster(plan, device):
        return
    flash = plan.workload.with_layout(attention="flash")
    with_flash = gib(fullest_stage(flash, plan.stages).total)
    with_fused = gib(fullest_stage(plan.workload, plan.stages).total)
    sizes = []
    if with_flash != with_fused:
        sizes.append(f"{with_flash} instead of {with_fused}")
    if plan.layout.recomputes:
        without_recompute = fullest_stage(flash.with_layout(recomputes=False), plan.stages).total
        if without_recompute <= device.usable:
            sizes.append(f"{gib(without_recompute)} without checkpoint_activations, which fits")
    if not sizes:
        return
    saved = ", and ".join(sizes)
    yield f"{FLASH_IS_FASTER}: {saved}"


def flash_is_faster(plan: RunPlan, device: Device) -> bool:
    """Return whether a GPU's run asks for the fused softmax where flash attention gives the same numbers faster.

    A search of layouts keeps the attention of the configuration, so it says this of all of them.
    """
    network = plan.architecture
    is_served = network.head_dim <= _FLASH_HEAD_DIM and not POSITIONS[network.positions].biases_scores
    if device.shared or plan.precision == "fp32" or not is_served:
        return False
    return "fused" in plan.attention and set(network.attention) == {"global"}


class MemoryProblem(NamedTuple):
    """Why a run does not fit.

    Attributes:
        text: Message with the nearest settings that fit.
        key: Key that sets the size of the memory that is too small.
        source: Text that says where this size comes from.
    """

    text: str
    key: str
    source: str


def memory_problem(plan: RunPlan, device: Device, *, training: bool) -> MemoryProblem | None:
    """Return why a run does not fit on its devices, or in the main memory of their hosts; None if it fits."""
    if not training:
        text = _inference_problem(plan, device)
        return None if text is None else MemoryProblem(text, device.size_key, device.source)
    fit = check_fit(plan, device)
    if fit.fits:
        return None
    text = _fit_message(fit, device, plan.grid.world_size)
    if device.main_memory is not None and device.lacks_main_memory(fit.memory):
        return MemoryProblem(text, "host_memory_gib", device.main_memory.source)
    return MemoryProblem(text, device.size_key, device.source)


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
    problem = f"a rank needs {_of_usable(fit.memory.needed(on_cpu=device.shared), device)}: does not fit"
    if device.main_memory is not None and device.lacks_main_memory(fit.memory):
        main_memory = f"{gib(fit.memory.host)} of the {gib(device.main_memory.size)} of main memory"
        problem = f"a rank needs {main_memory} that it has on its host: does not fit"
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
