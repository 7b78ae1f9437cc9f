"""Where each value of a plan comes from: a place that the user can change, or the rule that it follows from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from neox.config.neox_config import NeoXConfig, section_classes
from neox.plan.batches.batch import MICRO, STEPS, TOTAL
from neox.plan.devices.precision import PRECISION_KEYS
from neox.plan.run_plan import RunPlan
from neox.problems import Source


class Derived(NamedTuple):
    """A value that follows from others, and the rule."""

    value: Any
    rule: str


def derived_values(plan: RunPlan) -> dict[str, Derived]:
    """Return everything that follows from other values, by name."""
    grid = plan.grid
    return {
        "world": Derived(grid.world_size, _world_rule(plan)),
        "pp": Derived(grid.pp_size, f"{_key_and_source(plan.config, 'pipe_parallel_size')}; 0 and 1 are one stage"),
        "mp": Derived(grid.tp_size, _key_and_source(plan.config, "model_parallel_size")),
        "dp": Derived(grid.data_size, f"world {grid.world_size} / ({_model_ranks(plan)})"),
        "precision": Derived(plan.precision, _precision_rule(plan.config)),
        "padded_vocab_size": Derived(plan.padded_vocab_size, _vocabulary_rule(plan)),
        **_batch_values(plan),
        **_decay_values(plan.config),
    }


def _model_ranks(plan: RunPlan) -> str:
    """Return the degrees whose product is the number of ranks that read the same samples, as text."""
    grid = plan.grid
    degrees = f"pp {grid.pp_size} x mp {grid.tp_size}"
    if grid.cp_size > 1:
        degrees += f" x cp {grid.cp_size}"
    return degrees


def _world_rule(plan: RunPlan) -> str:
    if plan.config.runner.global_num_gpus == plan.grid.world_size:
        return str(plan.config.source("global_num_gpus"))
    return "the hosts"


def _precision_rule(config: NeoXConfig) -> str:
    given = [_key_and_source(config, key) for key in PRECISION_KEYS if config.given(key)]
    return ", ".join(given) or "default: neither precision, fp16 nor bf16 is given"


def _vocabulary_rule(plan: RunPlan) -> str:
    if plan.config.given("padded_vocab_size"):
        return str(plan.config.source("padded_vocab_size"))
    multiple = plan.config.model.make_vocab_size_divisible_by
    return f"{plan.vocab_size} ids rounded up to a multiple of {multiple} x mp {plan.grid.tp_size}"


def _batch_values(plan: RunPlan) -> dict[str, Derived]:
    """Return the three batch sizes, with the rule of each that is not given."""
    batch = plan.batch
    factors = f"{batch.train_micro_batch_size_per_gpu} x {batch.gradient_accumulation_steps} x dp {plan.grid.data_size}"
    values = {
        TOTAL: Derived(batch.train_batch_size, f"{MICRO} x {STEPS} x dp = {factors}"),
        MICRO: Derived(batch.train_micro_batch_size_per_gpu, f"{TOTAL} / ({STEPS} x dp)"),
        STEPS: Derived(batch.gradient_accumulation_steps, f"{TOTAL} / ({MICRO} x dp), or 1"),
    }
    for key, derived in values.items():
        source = plan.config.source(key)
        if not source.is_default:
            values[key] = derived._replace(rule=str(source))
    return values


def _decay_values(config: NeoXConfig) -> dict[str, Derived]:
    """Return the iterations of the learning rate's decay; nothing without train_iters."""
    if config.training.train_iters is None:
        return {}
    decisive = next(key for key in ("lr_decay_iters", "lr_decay_fraction", "train_iters") if config.given(key))
    iterations = config.schedule.decay_iterations(config.training.train_iters)
    return {"lr_decay_iters": Derived(iterations, _key_and_source(config, decisive))}


def _key_and_source(config: NeoXConfig, key: str) -> str:
    return f"{key} ({config.source(key)})"


def all_values(config: NeoXConfig) -> Iterator[tuple[str, Any, Source]]:
    """Yield key, value and source of every key of every section."""
    for name in section_classes():
        section = getattr(config, name)
        for key in type(section).model_fields:
            value = getattr(section, key)
            if hasattr(value, "model_dump"):
                value = value.model_dump(exclude_none=True)
            yield key, value, config.source(key)


def deepspeed_sources(plan: RunPlan) -> dict[str, str]:
    """Return dotted path -> source or rule of every value of DeepSpeed's JSON."""
    derived = derived_values(plan)
    precision = f"precision: {derived['precision'].rule}"
    rules = {
        "data_types.grad_accum_dtype": "bf16 with ZeRO accumulates in fp32",
        "communication_data_type": "fp32_allreduce",
        "bf16.enabled": precision,
        "fp16.enabled": precision,
    }
    sources = {}
    for path in _paths(plan.deepspeed):
        source = plan.config.source(path)
        if path in derived:
            sources[path] = derived[path].rule
        elif source.is_default and path in rules:
            sources[path] = rules[path]
        else:
            sources[path] = str(source)
    return sources


def _paths(value: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of the values inside a mapping of mappings."""
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _paths(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
