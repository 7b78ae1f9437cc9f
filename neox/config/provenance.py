"""Sources of the values of a plan: file and line, default, or rule of derivation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neox.config.grid_and_batch import MICRO, STEPS, TOTAL
from neox.config.neox_config import NeoXConfig, section_classes
from neox.config.plan import RunPlan


def derived_values(plan: RunPlan) -> dict[str, tuple[Any, str]]:
    """Return name -> (value, rule) of everything that follows from other values."""
    grid, batch, config = plan.grid, plan.batch, plan.config
    source, ranks = config.source, "global_num_gpus"
    rules: dict[str, tuple[Any, str]] = {
        "world": (grid.world_size, source(ranks) if getattr(config.runner, ranks) == grid.world_size else "the hosts"),
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
        rules[key] = (value, source(key) if source(key) != "default" else rule)
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
                config.source(key),
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
            source = rules[path][1]
        elif source == "default":
            source = fixed.get(path, "default")
        result[path] = source
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
        return config.source("padded_vocab_size")
    multiple = config.model.make_vocab_size_divisible_by
    return f"{plan.vocab_size} ids rounded up to a multiple of {multiple} x mp {plan.grid.tp_size}"
