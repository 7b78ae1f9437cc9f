"""Longest sequence length that fits in memory, and the smallest change of settings that allows twice that length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from neox.architecture import block_kinds
from neox.config.neox_config import NeoXConfig
from neox.plan.devices.device import Device
from neox.plan.layout import Layout, Workload
from neox.plan.rules.context import networks_without_context_ranks
from neox.plan.run_plan import RunPlan
from neox.plan.search.fit import (
    LayoutMemory,
    nearest_layout,
    settings_text,
    smaller_or_offloading_layouts,
    wider_layout,
)

_STEP = 256  # lengths are multiples of this, if this many tokens fit
_LONGEST = 2**30
_MOST_GROWTH = 8
_FAR = 64  # multiple of the run's sequence length
_POSITIONS_BY_TABLE = "learned"


@dataclass(frozen=True)
class LongestSample:
    """Longest sequence length that fits in memory.

    Attributes:
        tokens: Largest `seq_length` that fits with the plan's settings; 0 if none fits.
        changes: Keys and values with which twice this length fits; empty if none were found.
        world: Number of devices for twice this length; 0 if no settings were found.
    """

    tokens: int
    changes: tuple[tuple[str, str], ...] = ()
    world: int = 0


def longest_sample(plan: RunPlan, device: Device) -> LongestSample | None:
    """Return the longest sequence length of a training that fits on a device; None if parameters depend on it."""
    network = plan.architecture
    has_fixed_length = any(kind.has_fixed_length for kind in block_kinds(network))
    if network.positions == _POSITIONS_BY_TABLE or has_fixed_length or network.bidirectional:
        return None
    if device.shared and device.assumed:  # the size of the memory is unknown
        return None
    memory = LayoutMemory(plan, device)
    tokens = _longest_that_fits(plan.layout, memory)
    if tokens == 0:
        return LongestSample(0)

    # The fewest changes with which twice as many tokens fit, on as few devices as possible.
    longer = replace(plan.layout, seq_length=2 * tokens)
    growth = 1
    while growth <= (1 if device.shared else _MOST_GROWTH):
        wider = wider_layout(longer, growth)
        found = nearest_layout(wider, memory, _layouts_for_long_samples)
        if found is not None:
            return LongestSample(tokens, found.keys_changed_from(wider), plan.grid.world_size * growth)
        growth *= 2
    return LongestSample(tokens)


def length_notes(plan: RunPlan, device: Device, longest: LongestSample | None) -> Iterator[str]:
    """Yield a note about the longest sequence length that fits, and the settings that allow twice that length.

    Args:
        plan: The plan of a training.
        device: What a rank runs on.
        longest: `longest_sample` of both.
    """
    if longest is None:
        return
    if longest.tokens == 0:
        yield "no seq_length fits with these settings"
        return
    length = plan.config.model.seq_length
    if device.shared and length is not None and longest.tokens > _FAR * length:  # a small run on a CPU
        return
    line = f"seq_length may be up to {longest.tokens:,} with these settings"
    if longest.world:
        devices = "" if longest.world == plan.grid.world_size else f" on {longest.world} of these"
        line += f"; twice that fits{devices} with {settings_text(longest.changes)}"
    yield line


def _longest_that_fits(layout: Layout, memory: LayoutMemory) -> int:
    """Return the largest number of tokens of a sample that fits, by doubling and then bisection; 0 if none fits."""

    def fits(tokens: int) -> bool:
        return memory.fits(replace(layout, seq_length=tokens))

    unit = 2 * layout.cp_size if layout.cp_size > 1 else 1
    if layout.sequence_parallel:
        unit *= layout.tp_size
    step = math.lcm(unit, _STEP)
    if not fits(step):
        step = unit
    low = 0  # the largest number of steps that is known to fit
    high = 1  # the smallest number that is not
    while high * step <= _LONGEST and fits(high * step):
        low = high
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle
    return low * step


def divides_over_context_ranks(config: NeoXConfig) -> bool:
    """Return whether the network and its objective support context parallelism."""
    return next(networks_without_context_ranks(config), None) is None


def _layouts_for_long_samples(run: Workload) -> Iterator[Layout]:
    """Yield layouts one step away that need less memory, with those that need less per sample.

    A larger context parallel degree comes last.
    """
    yield from smaller_or_offloading_layouts(run)
    layout = run.layout
    width = run.network.hidden_size  # a good tile: tokens and weights of its matrix products are equally large
    if not layout.tile_tokens and run.recomputes_blocks and width < run.queries:
        yield replace(layout, tile_tokens=width)
    if run.recomputes_blocks and not layout.kept_inputs_on_cpu and not run.on_cpu:
        yield replace(layout, kept_inputs_on_cpu=True)
    degree = 2 * layout.cp_size
    is_divisible = layout.dp_size % degree == 0 and run.sequence_length % (2 * degree) == 0
    if is_divisible and divides_over_context_ranks(run.config):
        yield replace(layout, cp_size=degree, accumulation_steps=2 * layout.accumulation_steps)
