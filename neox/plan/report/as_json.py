"""Report of a plan as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel

from neox.plan.devices.device import Device, gpu_device, memory_on
from neox.plan.devices.fast_paths import path_choices
from neox.plan.memory import MemoryPlan, stage_memory
from neox.plan.memory.checkpoint_size import checkpoint_bytes, kept_checkpoints
from neox.plan.network.parameter_groups import group_lines
from neox.plan.ranks.stages import StagePlan
from neox.plan.report.run_totals import imbalance, memory_with, run_totals, stage_ranks
from neox.plan.report.value_sources import all_values, deepspeed_sources, derived_values
from neox.plan.run_identity import starting_weights
from neox.plan.run_plan import RunPlan
from neox.plan.search.fit import check_fit, flash_advice
from neox.plan.search.longest_sequence import LongestSample, length_notes, longest_sample
from neox.plan.time.expert_traffic import expert_traffic


def plan_as_dict(
    plan: RunPlan, device: Device | None = None, *, notes: Sequence[str] | None = None, search: bool = True
) -> dict[str, Any]:
    """Return the plan as one JSON-ready object: grid, batch, stages, memory, figures, sources, deepspeed.

    Args:
        plan: The plan of a run.
        device: What a rank runs on; by default a GPU of `gpu_memory_gib`.
        notes: Messages for people; those of the plan if left out.
        search: Whether to search the longest sample, and settings that fit where the plan's do not.
    """
    device = device or gpu_device(plan)
    shown = list(plan.notes if notes is None else notes)
    memory = _memory_on(plan, device)
    if search:
        longest = longest_sample(plan, device)
        shown += [*flash_advice(plan, device), *length_notes(plan, device, longest)]
        memory |= _searched(plan, device, longest)
    grid = plan.grid
    traffic = expert_traffic(plan)
    return {
        "grid": {
            "pp": grid.pp_size,
            "mp": grid.tp_size,
            "cp": grid.cp_size,
            "dp": grid.data_size,
            "ep": grid.ep_size,
            "world": grid.world_size,
        },
        "batch": asdict(plan.batch),
        "start": str(plan.start) if plan.start is not None and plan.start.checkpoint else starting_weights(plan.config),
        "checkpoint": None if plan.start is None else plan.start.to_json(),
        "precision": plan.precision,
        "vocab_size": plan.vocab_size,
        "padded_vocab_size": plan.padded_vocab_size,
        "parameters": plan.layers.numel,
        "active_parameters": plan.layers.active_numel,
        "parameter_groups": list(group_lines(plan.layers, plan.config)),
        "stages": [_stage(plan, stage) for stage in plan.stages],
        "imbalance": imbalance(plan),
        "memory": memory,
        "kernels": [asdict(choice) for choice in path_choices(plan, device.family)],
        "figures": asdict(run_totals(plan, device)),
        "expert_traffic": None if traffic is None else traffic._asdict(),
        "save_iterations": len(plan.save_iterations),
        "checkpoint_bytes": checkpoint_bytes(plan),
        "checkpoints_kept": kept_checkpoints(plan),
        "decisions": [decision.to_json() for decision in plan.decisions],
        "notes": shown,
        "derived": {name: {"value": found.value, "from": found.rule} for name, found in derived_values(plan).items()},
        "values": {key: {"value": plain(value), "from": str(place)} for key, value, place in all_values(plan.config)},
        "deepspeed": plain(plan.deepspeed),
        "deepspeed_from": deepspeed_sources(plan),
    }


def _stage(plan: RunPlan, stage: StagePlan) -> dict[str, Any]:
    return {
        "layers": len(stage.layers),
        "ranges": [[held.start, held.stop] for held in stage.ranges],
        "contents": stage_contents(plan, stage),
        "parameters": stage.parameters,
        "ranks": list(stage_ranks(plan, stage.index)),
        "memory": _memory(stage_memory(plan.workload, stage)),
    }


def _memory_on(plan: RunPlan, device: Device) -> dict[str, Any]:
    return {
        **_memory(memory_on(plan, device)),
        "device": device.name,
        "device_bytes": device.size,
        "usable_bytes": device.usable,
        "usable_main_memory_bytes": None if device.main_memory is None else device.main_memory.size,
        "assumed": device.assumed,
    }


def _searched(plan: RunPlan, device: Device, longest: LongestSample | None) -> dict[str, Any]:
    """Return memory with other settings: what would fit, and how long a sample may be."""
    fit = check_fit(plan, device)
    twice = longest is not None and longest.world > 0  # else no settings for twice the length were found
    return {
        "without_recompute": _memory(memory_with(plan, recompute=False, device=device)),
        "with_recompute": _memory(memory_with(plan, recompute=True, device=device)),
        "fits": fit.fits,
        "would_fit_with": dict(fit.changes),
        "would_fit_on": None if fit.memory_then is None else fit.world,
        "longest_seq_length": None if longest is None else longest.tokens,
        "twice_as_long_with": dict(longest.changes) if longest is not None and twice else None,
        "twice_as_long_on": longest.world if longest is not None and twice else None,
    }


def _memory(memory: MemoryPlan) -> dict[str, int]:
    return {**asdict(memory), "total": memory.total}


def stage_contents(plan: RunPlan, stage: StagePlan) -> str:
    """Return which layers a stage holds: `embedding, 11 blocks`."""
    kinds = [layer.kind for layer in stage.entries(plan.layers)]
    blocks = count(kinds.count("block"), "block")
    contents = [blocks]
    if "embedding" in kinds:
        contents.insert(0, "embedding")
    for kind in ("norm", "head", "masked_lm_head", "sentence_head", "score_head"):
        if kind in kinds:
            contents.append(kind.replace("_", " "))
    return ", ".join(contents)


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 step`, `1,000 steps`."""
    if number != 1:
        noun += "s"
    return f"{number:,} {noun}"


def plain(value: Any) -> Any:
    """Return mappings, blocks and tuples, and those inside them, as dicts and lists."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value
