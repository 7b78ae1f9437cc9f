"""Report of a plan as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
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
from neox.plan.search.longest_sequence import length_notes, longest_sample
from neox.plan.time.expert_traffic import expert_traffic


def plan_as_dict(plan: RunPlan, device: Device | None = None) -> dict[str, Any]:
    """Return the plan as one JSON-ready object: grid, batch, stages, memory, figures, sources, deepspeed.

    Args:
        plan: The plan of a run.
        device: What a rank runs on; by default a GPU of `gpu_memory_gib`.
    """
    device = device or gpu_device(plan)
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
        "start": starting_weights(plan.config),
        "precision": plan.precision,
        "vocab_size": plan.vocab_size,
        "padded_vocab_size": plan.padded_vocab_size,
        "parameters": plan.layers.numel,
        "active_parameters": plan.layers.active_numel,
        "parameter_groups": list(group_lines(plan.layers, plan.config)),
        "stages": [_stage(plan, stage) for stage in plan.stages],
        "imbalance": imbalance(plan),
        "memory": _memory_and_fit(plan, device),
        "kernels": [asdict(choice) for choice in path_choices(plan, device.family)],
        "figures": asdict(run_totals(plan, device)),
        "expert_traffic": None if traffic is None else traffic._asdict(),
        "save_iterations": len(plan.save_iterations),
        "checkpoint_bytes": checkpoint_bytes(plan),
        "checkpoints_kept": kept_checkpoints(plan),
        "notes": [*plan.notes, *flash_advice(plan, device), *length_notes(plan, device)],
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


def _memory_and_fit(plan: RunPlan, device: Device) -> dict[str, Any]:
    fit = check_fit(plan, device)
    longest = longest_sample(plan, device)
    longest_length = None
    changes_for_twice = None
    world_for_twice = None
    if longest is not None:
        longest_length = longest.tokens
        if longest.world:  # else no settings for twice the length were found
            changes_for_twice = dict(longest.changes)
            world_for_twice = longest.world
    return {
        **_memory(memory_on(plan, device)),
        "without_recompute": _memory(memory_with(plan, recompute=False, device=device)),
        "with_recompute": _memory(memory_with(plan, recompute=True, device=device)),
        "device": device.name,
        "device_bytes": device.size,
        "usable_bytes": device.usable,
        "usable_main_memory_bytes": None if device.main_memory is None else device.main_memory.size,
        "assumed": device.assumed,
        "fits": fit.fits,
        "would_fit_with": dict(fit.changes),
        "would_fit_on": None if fit.memory_then is None else fit.world,
        "longest_seq_length": longest_length,
        "twice_as_long_with": changes_for_twice,
        "twice_as_long_on": world_for_twice,
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
