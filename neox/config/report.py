"""Reports of a plan as text and as JSON: degrees, batch, memory, compute, sources."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from neox.architecture import training_flops_per_token
from neox.config.fit import GIB, Fit, check_fit, inference_bytes, inference_memory_problem
from neox.config.memory import fullest_stage, memory_setting, stage_memory
from neox.config.plan import MemoryPlan, RunPlan, StagePlan
from neox.config.provenance import all_values, deepspeed_sources, derived_values

# Dense bf16 peak of one H100 SXM, assumed where peak_theoretical_tflops is not given.
ASSUMED_PEAK_TFLOPS = 989.0


@dataclass(frozen=True)
class Figures:
    """Tokens, compute and time of a run.

    Attributes:
        tokens_per_step: Tokens of one optimizer step.
        tokens: Tokens of the whole run; None without train_iters.
        flops_per_token: Operations of forward and backward, without recomputation.
        bubble: Fraction of a step in which a pipeline stage is idle.
        peak_tflops: Assumed peak of one GPU.
        mfu: Assumed model FLOPs utilisation.
        days: Time of the whole run; None without train_iters.
    """

    tokens_per_step: int
    tokens: int | None
    flops_per_token: int
    bubble: float
    peak_tflops: float
    mfu: float
    days: float | None


def plan_as_dict(plan: RunPlan) -> dict[str, Any]:
    """Return the plan as one JSON-ready object: grid, batch, stages, memory, figures, sources, deepspeed."""
    grid, fit = plan.grid, check_fit(plan, plan.config.runner.gpu_memory_gib * GIB)
    return {
        "grid": {"pp": grid.pp_size, "mp": grid.tp_size, "dp": grid.dp_size, "world": grid.world_size},
        "batch": asdict(plan.batch),
        "precision": plan.precision,
        "vocab_size": plan.vocab_size,
        "padded_vocab_size": plan.padded_vocab_size,
        "parameters": plan.layers.numel,
        "stages": [_stage(plan, index, stage) for index, stage in enumerate(plan.stages)],
        "imbalance": imbalance(plan),
        "memory": {
            **_memory(plan.memory),
            "without_recompute": _memory(memory_with(plan, recompute=False)),
            "with_recompute": _memory(memory_with(plan, recompute=True)),
            "gpu_bytes": int(plan.config.runner.gpu_memory_gib * GIB),
            "usable_bytes": fit.usable,
            "fits": fit.fits,
            "would_fit_with": dict(fit.changes),
            "would_fit_on": fit.world if fit.memory_then is not None else None,
        },
        "figures": asdict(figures(plan)),
        "save_iterations": len(plan.save_iterations),
        "notes": list(plan.notes),
        "derived": {name: {"value": value, "from": rule} for name, (value, rule) in derived_values(plan).items()},
        "values": {key: {"value": _plain(value), "from": source} for key, value, source in all_values(plan.config)},
        "deepspeed": _plain(plan.deepspeed),
        "deepspeed_from": deepspeed_sources(plan),
    }


def format_plan(plan: RunPlan, *, training: bool = True) -> str:
    """Return the plan as text for a terminal.

    Args:
        plan: The plan of a run.
        training: False where the model only generates or is evaluated: less memory, and no DeepSpeed.
    """
    of_training = (_memory_lines, _figure_lines)
    sections = (_grid_lines, _model_lines, *(of_training if training else (_inference_lines,)), _source_lines)
    lines = [line for section in sections for line in section(plan)]
    lines += _labelled("note", plan.notes)
    if training:
        lines.append("deepspeed " + json.dumps(_plain(plan.deepspeed), indent=2))
    return "\n".join(lines)


def figures(plan: RunPlan) -> Figures:
    """Return the tokens, compute and time of a plan."""
    steps, pp = plan.batch.gradient_accumulation_steps, plan.grid.pp_size
    per_step = plan.batch.train_batch_size * (plan.config.model.seq_length or 0)
    iterations = plan.config.training.train_iters
    tokens = None if iterations is None else per_step * iterations
    peak = plan.config.logging.peak_theoretical_tflops or ASSUMED_PEAK_TFLOPS
    mfu = plan.config.logging.expected_mfu
    operations = training_flops_per_token(plan.layers, plan.config.model.seq_length or 0)
    days = None if tokens is None else tokens * operations / (plan.grid.world_size * peak * 1e12 * mfu) / 86_400
    return Figures(per_step, tokens, operations, (pp - 1) / (steps + pp - 1), peak, mfu, days)


def memory_problem(plan: RunPlan, gpu_bytes: float) -> str | None:
    """Return a message if the run does not fit on GPUs of this size (bytes), with the nearest settings that do."""
    fit = check_fit(plan, gpu_bytes)
    return None if fit.fits else _fit_message(fit, gpu_bytes, plan.grid.world_size)


def memory_with(plan: RunPlan, *, recompute: bool) -> MemoryPlan:
    """Return the fullest GPU's memory with or without recompute of activations, all else equal."""
    setting = memory_setting(plan.config, plan.grid, plan.batch, plan.precision, plan.attention)
    wanted = plan.config.training.checkpoint_num_layers if recompute else 0
    return fullest_stage(plan.layers, _bounds(plan), replace(setting, recompute=wanted))


def imbalance(plan: RunPlan) -> float:
    """Return the largest stage's parameters over the mean stage's."""
    counts = [stage.parameters for stage in plan.stages]
    return max(counts) * len(counts) / sum(counts)


def stage_ranks(plan: RunPlan, stage: int) -> tuple[int, int]:
    """Return the first and last rank of a stage; its tensor groups are consecutive runs of mp ranks."""
    size = plan.grid.dp_size * plan.grid.tp_size
    return stage * size, (stage + 1) * size - 1


def _grid_lines(plan: RunPlan) -> Iterator[str]:
    grid, batch = plan.grid, plan.batch
    ranks, stages = _count(grid.world_size, "rank"), _count(grid.pp_size, "pipeline stage")
    yield f"grid      {ranks} = {stages} x {grid.dp_size} data x {grid.tp_size} tensor"
    yield (
        f"batch     {_count(batch.train_batch_size, 'sample')} = {batch.train_micro_batch_size_per_gpu} per GPU x "
        f"{_count(batch.gradient_accumulation_steps, 'accumulation step')} x {grid.dp_size} data"
    )


def _model_lines(plan: RunPlan) -> Iterator[str]:
    yield (
        f"model     {plan.layers.numel:,} parameters, {plan.precision}, vocabulary {plan.vocab_size:,} padded to "
        f"{plan.padded_vocab_size:,}"
    )
    for index, stage in enumerate(plan.stages):
        first, last = stage_ranks(plan, index)
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        groups = f", {plan.grid.dp_size} tensor groups of {plan.grid.tp_size} in a row" if plan.grid.tp_size > 1 else ""
        yield (
            f"stage {index:<3} layers {stage.first}-{stage.last - 1} ({_contents(plan, stage)}), "
            f"{stage.parameters:,} parameters; {ranks}{groups}"
        )
    if plan.grid.pp_size > 1:
        yield f"          the largest stage holds {imbalance(plan):.3f} x the mean"


def _memory_lines(plan: RunPlan) -> Iterator[str]:
    memory = plan.memory
    parts = ", ".join(f"{name} {_gib(getattr(memory, name))}" for name in ("weights", "gradients", "optimizer"))
    yield f"memory    {_gib(memory.total)} on the fullest GPU: {parts}, activations {_gib(memory.activations)}"
    without, recomputed = memory_with(plan, recompute=False), memory_with(plan, recompute=True)
    chosen = "with" if plan.config.training.checkpoint_activations else "without"
    yield (
        f"          activations {_gib(recomputed.activations)} with recompute, {_gib(without.activations)} without "
        f"(this run: {chosen})"
    )
    gpu_bytes = plan.config.runner.gpu_memory_gib * GIB
    fit = check_fit(plan, gpu_bytes)
    source = plan.config.source("gpu_memory_gib")
    verdict = f"fits on a GPU of {_gib(gpu_bytes)}, of which {_gib(fit.usable)} are usable" if fit.fits else None
    yield f"          {verdict or _fit_message(fit, gpu_bytes, plan.grid.world_size)} (gpu_memory_gib: {source})"


def _inference_lines(plan: RunPlan) -> Iterator[str]:
    needed, gpu_bytes = (
        inference_bytes(plan, plan.grid.pp_size, plan.grid.tp_size),
        plan.config.runner.gpu_memory_gib * GIB,
    )
    verdict = inference_memory_problem(plan, gpu_bytes) or f"fits on a GPU of {_gib(gpu_bytes)}"
    yield f"memory    {_gib(needed)} on the fullest GPU: weights, keys and values"
    yield f"          {verdict} (gpu_memory_gib: {plan.config.source('gpu_memory_gib')})"


def _figure_lines(plan: RunPlan) -> Iterator[str]:
    found = figures(plan)
    yield (
        f"step      {found.tokens_per_step:,} tokens, {_flop(found.flops_per_token)} per token, "
        f"pipeline bubble {100 * found.bubble:.1f} %"
    )
    if found.days is not None and found.tokens is not None:
        yield (
            f"run       {plan.config.training.train_iters:,} steps, {found.tokens:,} tokens: {found.days:,.2f} days at "
            f"{100 * found.mfu:.0f} % MFU of {found.peak_tflops:,.0f} TFLOP/s (expected_mfu, peak_theoretical_tflops)"
        )
    if plan.save_iterations:
        saves = _count(len(plan.save_iterations), "checkpoint")
        yield f"saves     {saves}, the last after step {plan.save_iterations[-1]:,}"


def _source_lines(plan: RunPlan) -> Iterator[str]:
    yield from _labelled(
        "derived", [f"{name} = {value}: {rule}" for name, (value, rule) in derived_values(plan).items()]
    )
    given = [(key, value, source) for key, value, source in all_values(plan.config) if source != "default"]
    yield from _labelled("given", [f"{key} = {_short(value)}: {source}" for key, value, source in given])
    yield "          all other keys have their defaults (configs/neox_arguments.md; --json lists them)"


def _labelled(label: str, texts: Any) -> Iterator[str]:
    for index, text in enumerate(texts):
        yield f"{label if index == 0 else '':<10}{text}"


def _fit_message(fit: Fit, gpu_bytes: float, world: int) -> str:
    found = f"needs {_gib(fit.needed)} of the {_gib(fit.usable)} usable on a GPU of {_gib(gpu_bytes)}: does not fit"
    if fit.memory_then is None:
        return f"{found}, nor with more GPUs and nearby settings; use other degrees of parallelism, or a larger GPU"
    changes = " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in fit.changes)
    more = f" on {fit.world} GPUs" if fit.world != world else ""
    return f"{found}; {_gib(fit.memory_then.total)}{more} with {changes or 'the same settings'}"


def _stage(plan: RunPlan, index: int, stage: StagePlan) -> dict[str, Any]:
    setting = memory_setting(plan.config, plan.grid, plan.batch, plan.precision, plan.attention)
    first, last = stage_ranks(plan, index)
    return {
        "layers": stage.last - stage.first,
        "first": stage.first,
        "last": stage.last,
        "contents": _contents(plan, stage),
        "parameters": stage.parameters,
        "ranks": [first, last],
        "memory": _memory(stage_memory(plan.layers, _bounds(plan), index, setting)),
    }


def _contents(plan: RunPlan, stage: StagePlan) -> str:
    """Return which layers a stage holds: `embedding, 11 blocks`."""
    kinds = [layer.kind for layer in plan.layers.layers[stage.first : stage.last]]
    blocks = kinds.count("block")
    others = [kind for kind in ("embedding", "norm", "head") if kind in kinds]
    words = [*others[: others.count("embedding")], f"{blocks} block{'s' if blocks != 1 else ''}"]
    return ", ".join([*words, *(kind for kind in others if kind != "embedding")])


def _bounds(plan: RunPlan) -> list[int]:
    return [0, *(stage.last for stage in plan.stages)]


def _memory(memory: MemoryPlan) -> dict[str, int]:
    return {**asdict(memory), "total": memory.total}


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 or not count else f"{count / 2**20:.1f} MiB"


def _flop(count: float) -> str:
    return f"{count / 1e9:.2f} GFLOP" if count >= 1e9 else f"{count / 1e6:.2f} MFLOP"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _short(value: Any) -> str:
    text = json.dumps(_plain(value))
    return text if len(text) <= 70 else text[:67] + "..."


def _plain(value: Any) -> Any:
    """Return mappings and tuples as dicts and lists."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
