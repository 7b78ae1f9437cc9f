"""Longest sequence length that fits in memory, and the smallest change of settings that allows twice that length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from neox.architecture import block_kinds
from neox.config.neox_config import NeoXConfig
from neox.plan.device import Device
from neox.plan.fit import Limits, limits_of, memory_of_settings, moves, nearest_setting, setting_changes, settings_text
from neox.plan.memory import MemorySetting
from neox.plan.rules.context import networks_without_context_ranks
from neox.plan.run_plan import RunPlan

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
    memory = memory_of_settings(plan)

    def fits(setting: MemorySetting) -> bool:
        return memory(setting).needed(on_cpu=device.shared) <= device.usable

    start = replace(plan.memory_setting, on_cpu=device.shared)
    tokens = _longest_that_fits(start, network.soft_prompt_tokens, fits)
    if tokens == 0:
        return LongestSample(0)
    return _doubled(plan, start, tokens, fits)


def length_notes(plan: RunPlan, device: Device) -> Iterator[str]:
    """Yield a note about the longest sequence length that fits, and the settings that allow twice that length."""
    longest = longest_sample(plan, device)
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


def _longest_that_fits(setting: MemorySetting, prompt: int, fits: Callable[[MemorySetting], bool]) -> int:
    """Return the largest number of tokens of a sample that fits, by doubling and then bisection; 0 if none fits."""
    unit = 2 * setting.cp_size if setting.cp_size > 1 else 1
    if setting.sequence_parallel:
        unit *= setting.tp_size
    step = math.lcm(unit, _STEP)
    if not fits(_with_length(setting, step, prompt)):
        step = unit
    low = 0  # the largest number of steps that is known to fit
    high = 1  # the smallest number that is not
    while high * step <= _LONGEST and fits(_with_length(setting, high * step, prompt)):
        low = high
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if fits(_with_length(setting, middle * step, prompt)):
            low = middle
        else:
            high = middle
    return low * step


def _with_length(setting: MemorySetting, tokens: int, prompt: int) -> MemorySetting:
    """Return a setting with another sequence length."""
    whole = tokens + prompt
    predicted = setting.predicted_tokens
    if predicted == setting.sequence_length:
        predicted = whole
    return replace(setting, sequence_length=whole, predicted_tokens=predicted)


def _doubled(plan: RunPlan, start: MemorySetting, tokens: int, fits: Callable[[MemorySetting], bool]) -> LongestSample:
    """Find the fewest changes with which twice as many tokens fit, on as few devices as possible."""
    longer = _with_length(start, 2 * tokens, plan.architecture.soft_prompt_tokens)
    limits = limits_of(plan)
    width = plan.architecture.hidden_size
    may_divide = divides_over_context_ranks(plan.config)

    def all_moves(setting: MemorySetting, limits: Limits) -> Iterator[MemorySetting]:
        yield from moves(setting, limits)
        yield from _moves_of_long_samples(setting, width, may_divide=may_divide)

    growth = 1
    while growth <= (1 if start.on_cpu else _MOST_GROWTH):
        wider = replace(
            longer, dp_size=longer.dp_size * growth, accumulation_steps=max(1, longer.accumulation_steps // growth)
        )
        found = nearest_setting(wider, limits, fits, all_moves)
        if found is not None:
            return LongestSample(tokens, setting_changes(wider, found), plan.grid.world_size * growth)
        growth *= 2
    return LongestSample(tokens)


def divides_over_context_ranks(config: NeoXConfig) -> bool:
    """Return whether the network and its objective support context parallelism."""
    return next(networks_without_context_ranks(config), None) is None


def _moves_of_long_samples(setting: MemorySetting, width: int, *, may_divide: bool) -> Iterator[MemorySetting]:
    """Yield settings one step away that need less memory per sample; a larger context parallel degree comes last.

    Args:
        setting: The setting.
        width: Hidden size. It is a good tile size: tokens and weights of a tile's matrix products are equally large.
        may_divide: Whether context parallelism is supported.
    """
    recomputes_whole = setting.recompute_chunk > 0 and setting.recomputed_part == "full"
    if not setting.tile_tokens and recomputes_whole and width < setting.queries:
        yield replace(setting, tile_tokens=width)
    if recomputes_whole and not setting.kept_inputs_on_cpu and not setting.on_cpu:
        yield replace(setting, kept_inputs_on_cpu=True)
    degree = 2 * setting.cp_size
    if may_divide and setting.dp_size % degree == 0 and setting.sequence_length % (2 * degree) == 0:
        gathers = setting.gathers_keys or setting.cp_size == 1
        yield replace(setting, cp_size=degree, gathers_keys=gathers, accumulation_steps=2 * setting.accumulation_steps)
