"""Reports of a plan as text and as JSON: degrees, batch, memory, compute, sources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from neox.architecture import training_flops_per_token
from neox.config.neox_config import NeoXConfig, section_classes
from neox.config.sections.pipeline_schedules import PIPELINE_SCHEDULES
from neox.plan.batch import MICRO, STEPS, TOTAL
from neox.plan.device import Device, gib, gpu_device, memory_on
from neox.plan.fit import check_fit, flash_advice, memory_problem
from neox.plan.inference import inference_bytes
from neox.plan.memory import MemoryPlan, fullest_stage, stage_memory
from neox.plan.run_plan import RunPlan
from neox.plan.schedule import schedule_of
from neox.plan.stages import StagePlan

_LOSS_MEANS: Mapping[str, str] = MappingProxyType(
    {
        "tokens": "the labels of a step",
        "micro_batch": "the labels of each micro batch",
        "samples": "the samples of a step",
    }
)


@dataclass(frozen=True)
class Figures:
    """Tokens, compute and time of a run.

    Attributes:
        tokens_per_step: Tokens of one optimizer step, after ramp-up and curriculum.
        tokens: Tokens of the whole run; None without train_iters.
        flops_per_token: Operations of forward and backward, without recomputation.
        bubble: Fraction of a step in which a pipeline stage is idle.
        peak_tflops: Peak of one rank's device; None where it is not known.
        mfu: Assumed model FLOPs utilisation.
        days: Time of the whole run; None without train_iters, and where the peak is not known.
    """

    tokens_per_step: int
    tokens: int | None
    flops_per_token: int
    bubble: float
    peak_tflops: float | None
    mfu: float
    days: float | None


def plan_as_dict(plan: RunPlan, device: Device | None = None) -> dict[str, Any]:
    """Return the plan as one JSON-ready object: grid, batch, stages, memory, figures, sources, deepspeed.

    Args:
        plan: The plan of a run.
        device: What a rank runs on; a GPU of `gpu_memory_gib` where left out.
    """
    device = device or gpu_device(plan)
    grid, fit = plan.grid, check_fit(plan, device)
    return {
        "grid": {"pp": grid.pp_size, "mp": grid.tp_size, "dp": grid.dp_size, "world": grid.world_size},
        "batch": asdict(plan.batch),
        "precision": plan.precision,
        "vocab_size": plan.vocab_size,
        "padded_vocab_size": plan.padded_vocab_size,
        "parameters": plan.layers.numel,
        "stages": [_stage(plan, stage) for stage in plan.stages],
        "imbalance": imbalance(plan),
        "memory": {
            **_memory(memory_on(plan, device)),
            "without_recompute": _memory(memory_with(plan, recompute=False, device=device)),
            "with_recompute": _memory(memory_with(plan, recompute=True, device=device)),
            "device": device.name,
            "device_bytes": device.size,
            "usable_bytes": device.usable,
            "fits": fit.fits,
            "would_fit_with": dict(fit.changes),
            "would_fit_on": fit.world if fit.memory_then is not None else None,
        },
        "figures": asdict(figures(plan, device)),
        "save_iterations": len(plan.save_iterations),
        "notes": [*plan.notes, *flash_advice(plan, device)],
        "derived": {name: {"value": value, "from": rule} for name, (value, rule) in derived_values(plan).items()},
        "values": {key: {"value": _plain(value), "from": source} for key, value, source in all_values(plan.config)},
        "deepspeed": _plain(plan.deepspeed),
        "deepspeed_from": deepspeed_sources(plan),
    }


def format_plan(plan: RunPlan, device: Device | None = None, *, training: bool = True, verbose: bool = False) -> str:
    """Return the plan as text for a terminal.

    Args:
        plan: The plan of a run.
        device: What a rank runs on; a GPU of `gpu_memory_gib` where left out.
        training: False where the model only generates or is evaluated: less memory, and no DeepSpeed.
        verbose: Whether to show every stage, every given value with its source, and DeepSpeed's configuration.
    """
    device = device or gpu_device(plan)
    lines = [*_grid_lines(plan), *_model_lines(plan, verbose=verbose)]
    if training:
        lines += [*_memory_lines(plan, device, verbose=verbose), *_figure_lines(plan, device)]
    else:
        lines += _inference_lines(plan, device)
    lines += _source_lines(plan, verbose=verbose)
    lines += labelled("note", [*plan.notes, *(flash_advice(plan, device) if training else ())])
    if training and verbose:
        lines += labelled("deepspeed", json.dumps(_plain(plan.deepspeed), indent=2).splitlines())
    return "\n".join(lines)


def labelled(label: str, texts: Iterable[str]) -> list[str]:
    """Return lines with a label in front of the first and indentation in front of the others."""
    return [f"{'' if index else label:<10}{text}" for index, text in enumerate(texts)]


def figures(plan: RunPlan, device: Device | None = None) -> Figures:
    """Return the tokens, compute and time of a plan on a device; on a GPU of `gpu_memory_gib` where left out."""
    steps = plan.batch.gradient_accumulation_steps
    per_step = plan.batch.train_batch_size * (plan.config.model.seq_length or 0)
    iterations = plan.config.training.train_iters
    segments = () if iterations is None else tuple(plan.batch_schedule.segments(iterations))
    tokens = None if iterations is None else sum(segment.tokens for segment in segments)
    peak, mfu = (device or gpu_device(plan)).peak_tflops, plan.config.logging.expected_mfu
    model = plan.config.model
    flops = partial(training_flops_per_token, plan.layers, predicted=model.predicted_tokens)
    operations = flops(model.seq_length or 0)
    days = None
    if tokens is not None and peak is not None:
        total = sum(segment.tokens * flops(segment.seq_length) for segment in segments)
        days = total / (plan.grid.world_size * peak * 1e12 * mfu) / 86_400
    bubble = PIPELINE_SCHEDULES[plan.config.parallelism.pipeline_schedule].bubble(plan.grid.pp_size, steps)
    return Figures(per_step, tokens, operations, bubble, peak, mfu, days)


def memory_with(plan: RunPlan, *, recompute: bool, device: Device | None = None) -> MemoryPlan:
    """Return the fullest rank's memory with or without recompute of activations, all else equal."""
    chunk = plan.config.training.checkpoint_num_layers if recompute else 0
    on_cpu = device is not None and device.shared
    return fullest_stage(plan.layers, plan.stages, replace(plan.memory_setting, recompute_chunk=chunk, on_cpu=on_cpu))


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
    divided = ", which divide tokens too" if grid.sequence_parallel else ""
    yield f"grid      {ranks} = {stages} x {grid.dp_size} data x {grid.tp_size} tensor{divided}"
    yield (
        f"batch     {_count(batch.train_batch_size, 'sample')} = {batch.train_micro_batch_size_per_gpu} per rank x "
        f"{_count(batch.gradient_accumulation_steps, 'accumulation step')} x {grid.dp_size} data"
    )


def _model_lines(plan: RunPlan, *, verbose: bool) -> Iterator[str]:
    fp8 = f" (blocks multiply in fp8, {plan.config.training.fp8})" if plan.config.training.fp8 else ""
    yield (
        f"model     {plan.layers.numel:,} parameters, {plan.precision}{fp8}, vocabulary {plan.vocab_size:,} padded to "
        f"{plan.padded_vocab_size:,}"
    )
    network = plan.architecture
    kv_heads = "" if network.num_kv_heads == network.num_attention_heads else f" ({network.num_kv_heads} of keys)"
    yield (
        f"          width {network.hidden_size:,}, {_count(network.num_attention_heads, 'head')}{kv_heads} of "
        f"{network.head_dim}, MLP width {network.mlp_width:,}"
    )
    if verbose:
        for stage in plan.stages:
            first, last = stage_ranks(plan, stage.index)
            layers = " and ".join(f"{held.start}-{held.stop - 1}" for held in stage.ranges)
            ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
            tensor = plan.grid.tp_size
            groups = f", {plan.grid.dp_size} tensor groups of {tensor} in a row" if tensor > 1 else ""
            yield (
                f"stage {stage.index:<3} layers {layers} ({_contents(plan, stage)}), "
                f"{stage.parameters:,} parameters; {ranks}{groups}"
            )
    if plan.grid.pp_size > 1:
        layers = ", ".join(str(len(stage.layers)) for stage in plan.stages)
        yield f"stages    {layers} layers; the largest holds {imbalance(plan):.3f} x the mean's parameters"


def _memory_lines(plan: RunPlan, device: Device, *, verbose: bool) -> Iterator[str]:
    memory = memory_on(plan, device)
    parts = ", ".join(f"{name} {gib(getattr(memory, name))}" for name in ("weights", "gradients", "optimizer"))
    yield f"memory    {gib(memory.total)} on the fullest rank: {parts}, activations {gib(memory.activations)}"
    if memory.host:
        saves = memory.files or not device.shared
        why = "" if saves else "; ranks on CPUs have that memory anyway: offload saves nothing"
        yield f"          and {gib(memory.host)} of main memory for what each rank offloads{why}"
    if memory.files:
        yield f"          and {gib(memory.files)} of each rank in files of nvme_path"
    if memory.copies:
        yield f"          and {gib(memory.copies)} of main memory for the copies that async_save writes"
    if verbose:
        without, recomputed = (memory_with(plan, recompute=on, device=device) for on in (False, True))
        chosen = "with" if plan.config.training.checkpoint_activations else "without"
        yield (
            f"          activations {gib(recomputed.activations)} with recompute, {gib(without.activations)} without "
            f"(this run: {chosen})"
        )
    yield _verdict(plan, device, training=True)


def _inference_lines(plan: RunPlan, device: Device) -> Iterator[str]:
    needed = inference_bytes(plan, plan.grid.pp_size, plan.grid.tp_size)
    yield f"memory    {gib(needed)} on the fullest rank: weights, keys and values"
    yield _verdict(plan, device, training=False)


def _verdict(plan: RunPlan, device: Device, *, training: bool) -> str:
    fits = f"fits on {device.name}, of which {gib(device.usable)} are usable"
    return f"          {memory_problem(plan, device, training=training) or fits} ({device.source})"


def _figure_lines(plan: RunPlan, device: Device) -> Iterator[str]:
    found = figures(plan, device)
    yield f"loss      mean over {_LOSS_MEANS[plan.loss_normalization]} (loss_normalization)"
    bubble = f", pipeline bubble {100 * found.bubble:.1f} %" if plan.grid.pp_size > 1 else ""
    yield f"step      {found.tokens_per_step:,} tokens, {_flop(found.flops_per_token)} per token{bubble}"
    if found.tokens is not None:
        run = f"run       {plan.config.training.train_iters:,} steps, {found.tokens:,} tokens"
        if found.days is not None and found.peak_tflops is not None:
            run += (
                f": {_duration(found.days * 86_400)} at {100 * found.mfu:.0f} % MFU of {found.peak_tflops:,.0f} TFLOP/s"
                f" (expected_mfu, peak_theoretical_tflops: {plan.config.source('peak_theoretical_tflops')})"
            )
        yield run
        yield f"schedule  {schedule_of(plan.config).describe()}"
        for label, line in plan.batch_schedule.describe(plan.config.training.train_iters or 1):
            yield f"{label:<10}{line}"
    if plan.save_iterations:
        saves = _count(len(plan.save_iterations), "checkpoint")
        yield f"saves     {saves}, the last after step {plan.save_iterations[-1]:,}"


def _source_lines(plan: RunPlan, *, verbose: bool) -> Iterator[str]:
    """Yield what was derived from what; unless verbose, only what is no key's value itself."""
    config = plan.config
    yield from labelled(
        "derived",
        [
            f"{name} = {value}: {rule}"
            for name, (value, rule) in derived_values(plan).items()
            if verbose or not (config.given(name) or name in ("pp", "mp", "padded_vocab_size", "lr_decay_iters"))
        ],
    )
    if verbose:
        given = [(key, value, source) for key, value, source in all_values(config) if source != "default"]
        yield from labelled("given", [f"{key} = {_short(value)}: {source}" for key, value, source in given])
        yield "          all other keys have their defaults (configs/neox_arguments.md; --json lists them)"


def _stage(plan: RunPlan, stage: StagePlan) -> dict[str, Any]:
    first, last = stage_ranks(plan, stage.index)
    return {
        "layers": len(stage.layers),
        "ranges": [[held.start, held.stop] for held in stage.ranges],
        "contents": _contents(plan, stage),
        "parameters": stage.parameters,
        "ranks": [first, last],
        "memory": _memory(stage_memory(plan.layers, stage, plan.memory_setting)),
    }


def _contents(plan: RunPlan, stage: StagePlan) -> str:
    """Return which layers a stage holds: `embedding, 11 blocks`."""
    kinds = [layer.kind for layer in stage.entries(plan.layers)]
    blocks = kinds.count("block")
    others = [kind for kind in ("embedding", "norm", "head", "masked_lm_head", "sentence_head") if kind in kinds]
    words = [*others[: others.count("embedding")], f"{blocks} block{'s' if blocks != 1 else ''}"]
    return ", ".join([*words, *(kind.replace("_", " ") for kind in others if kind != "embedding")])


def _memory(memory: MemoryPlan) -> dict[str, int]:
    return {**asdict(memory), "total": memory.total}


def _duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} seconds" if seconds >= 0.1 else "under 0.1 seconds"


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


def derived_values(plan: RunPlan) -> dict[str, tuple[Any, str]]:
    """Return name -> (value, rule) of everything that follows from other values."""
    grid, batch, config = plan.grid, plan.batch, plan.config
    source, ranks = config.source, "global_num_gpus"
    counted = str(source(ranks)) if getattr(config.runner, ranks) == grid.world_size else "the hosts"
    rules: dict[str, tuple[Any, str]] = {
        "world": (grid.world_size, counted),
        "pp": (grid.pp_size, f"pipe_parallel_size ({source('pipe_parallel_size')}); 0 and 1 are one stage"),
        "mp": (grid.tp_size, f"model_parallel_size ({source('model_parallel_size')})"),
        "dp": (grid.dp_size, f"world {grid.world_size} / (pp {grid.pp_size} x mp {grid.tp_size})"),
        "precision": (plan.precision, _precision_rule(config)),
        "padded_vocab_size": (plan.padded_vocab_size, _vocabulary_rule(plan)),
    }
    product = f"{batch.train_micro_batch_size_per_gpu} x {batch.gradient_accumulation_steps} x dp {grid.dp_size}"
    missing = {
        TOTAL: (batch.train_batch_size, f"{MICRO} x {STEPS} x dp = {product}"),
        MICRO: (batch.train_micro_batch_size_per_gpu, f"{TOTAL} / ({STEPS} x dp)"),
        STEPS: (batch.gradient_accumulation_steps, f"{TOTAL} / ({MICRO} x dp), or 1"),
    }
    for key, (value, rule) in missing.items():
        rules[key] = (value, rule if source(key).is_default else str(source(key)))
    if config.training.train_iters is not None:
        schedule = config.schedule
        asked = [key for key in ("lr_decay_iters", "lr_decay_fraction", "train_iters") if config.given(key)]
        rules["lr_decay_iters"] = (
            schedule.decay_iterations(config.training.train_iters),
            f"{asked[0]} ({source(asked[0])})",
        )
    return rules


def all_values(config: NeoXConfig) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and source of every key of every section."""
    for name in section_classes():
        section = getattr(config, name)
        for key in type(section).model_fields:
            value = getattr(section, key)
            yield (
                key,
                value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value,
                str(config.source(key)),
            )


def deepspeed_sources(plan: RunPlan) -> dict[str, str]:
    """Return dotted path -> source or rule of every value of DeepSpeed's JSON."""
    rules = derived_values(plan)
    fixed = {
        "data_types.grad_accum_dtype": "bf16 with ZeRO accumulates in fp32",
        "communication_data_type": "fp32_allreduce",
        "bf16.enabled": f"precision: {rules['precision'][1]}",
        "fp16.enabled": f"precision: {rules['precision'][1]}",
    }
    result = {}
    for path in _paths(plan.deepspeed):
        source = plan.config.source(path)
        if path in rules:
            result[path] = rules[path][1]
        elif source.is_default:
            result[path] = fixed.get(path, str(source))
        else:
            result[path] = str(source)
    return result


def _paths(value: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _paths(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _precision_rule(config: NeoXConfig) -> str:
    keys = [key for key in ("precision", "fp16", "bf16") if config.given(key)]
    if not keys:
        return "default: neither precision, fp16 nor bf16 is given"
    return ", ".join(f"{key} ({config.source(key)})" for key in keys)


def _vocabulary_rule(plan: RunPlan) -> str:
    config = plan.config
    if config.given("padded_vocab_size"):
        return str(config.source("padded_vocab_size"))
    multiple = config.model.make_vocab_size_divisible_by
    return f"{plan.vocab_size} ids rounded up to a multiple of {multiple} x mp {plan.grid.tp_size}"
