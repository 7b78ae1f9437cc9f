"""The plan for people and for programs: what a run will be, before it costs anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from neox.config.plan import RunPlan


def plan_as_dict(plan: RunPlan) -> dict[str, Any]:
    """Return the plan as one JSON-ready object: grid, batch, stages, memory, deepspeed and what they follow from."""
    return {
        "grid": {"pp": plan.grid.pp, "mp": plan.grid.mp, "dp": plan.grid.dp, "world": plan.grid.world},
        "batch": {
            "train_batch_size": plan.batch.train_batch_size,
            "train_micro_batch_size_per_gpu": plan.batch.train_micro_batch_size_per_gpu,
            "gradient_accumulation_steps": plan.batch.gradient_accumulation_steps,
        },
        "precision": plan.precision,
        "vocab_size": plan.vocab_size,
        "padded_vocab_size": plan.padded_vocab_size,
        "parameters": plan.layers.numel,
        "stages": [
            {
                "layers": stage.last - stage.first,
                "first": stage.first,
                "last": stage.last,
                "parameters": stage.parameters,
            }
            for stage in plan.stages
        ],
        "memory": {
            "weights": plan.memory.weights,
            "gradients": plan.memory.gradients,
            "optimizer": plan.memory.optimizer,
            "activations": plan.memory.activations,
            "total": plan.memory.total,
        },
        "notes": list(plan.notes),
        "deepspeed": _plain(plan.deepspeed),
    }


def format_plan(plan: RunPlan) -> str:
    """Return the plan as text for a terminal."""
    grid, batch = plan.grid, plan.batch
    lines = [
        f"grid      {grid.world} ranks = {grid.pp} pipeline stages x {grid.dp} data x {grid.mp} tensor",
        f"batch     {batch.train_batch_size} samples = {batch.train_micro_batch_size_per_gpu} per GPU x "
        f"{batch.gradient_accumulation_steps} accumulation steps x {grid.dp}",
        f"model     {plan.layers.numel:,} parameters, {plan.precision}, vocabulary {plan.vocab_size:,} padded to "
        f"{plan.padded_vocab_size:,}",
    ]
    lines += [
        f"stage {i}   layers {stage.first}-{stage.last - 1}, {stage.parameters:,} parameters"
        for i, stage in enumerate(plan.stages)
    ]
    lines.append(f"memory    {plan.memory.total / 2**30:.1f} GiB on the fullest GPU")
    lines += [f"note      {note}" for note in plan.notes]
    lines.append("deepspeed " + json.dumps(_plain(plan.deepspeed), indent=2))
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    """Return mappings and tuples as dicts and lists."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
