"""Derivation of a `RunPlan` from a configuration: degrees, batch, layers, stages. Pure: no file, GPU or environment.

Ranks get what `resolve` has decided as one argument of their command (the payload), derive the rest from it, and
compare a digest with the launcher's.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import prod

from neox.architecture import Architecture, LayerPlan, build_layer_plan
from neox.config.keys import TOKENIZER_KEYS
from neox.config.neox_config import NeoXConfig
from neox.errors import ConfigError, LaunchError
from neox.plan.architecture import architecture_of, padded_vocabulary, with_adapters
from neox.plan.attention_config import attention_impls
from neox.plan.batch import BatchPlan, ramp_problems
from neox.plan.deepspeed_json import deepspeed_json
from neox.plan.fp8 import fp8_problems
from neox.plan.memory import fullest_stage, memory_setting
from neox.plan.precision import UNKNOWN_HOSTS, Capabilities, Precision, choose_precision, settle_precision
from neox.plan.rules import notes_without_effect, static_problems
from neox.plan.run_plan import RunPlan
from neox.plan.stages import StagePlan, plan_stages
from neox.plan.topology import Topology
from neox.problems import Problem, Source, in_file_order

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_BATCH_KEYS = (TOTAL, MICRO, STEPS)


def resolve(
    config: NeoXConfig, world_size: int, vocab_size: int, capabilities: Capabilities = UNKNOWN_HOSTS
) -> RunPlan:
    """Derive the plan of a run.

    Args:
        config: What the user asked for.
        world_size: Number of ranks.
        vocab_size: Number of ids the tokenizer can produce.
        capabilities: What the hosts can do, which decides `precision: auto` and whether `fp8` works.

    Returns:
        The plan; its configuration names the precision that was decided.

    Raises:
        ConfigError: Every rule that the configuration breaks.
    """
    config, precision_notes = settle_precision(config, capabilities)
    problems = static_problems(config)
    grid = solve_grid(config, world_size, problems)
    batch = solve_batch(config, grid.dp_size if grid else None, problems)
    problems += ramp_problems(config, batch) if batch else ()
    precision = choose_precision(config, [])  # a contradiction is among the problems above
    problems += _vocabulary_problems(config, vocab_size)
    if problems or grid is None or batch is None or precision is None:
        raise ConfigError(in_file_order(problems))
    plan = derive_plan(config, architecture_of(config), grid, batch, precision, vocab_size, precision_notes)
    if problems := list(fp8_problems(plan, capabilities)):
        raise ConfigError(problems)
    return plan


def derive_plan(
    config: NeoXConfig,
    architecture: Architecture,
    grid: Topology,
    batch: BatchPlan,
    precision: Precision,
    vocab_size: int,
    notes: Sequence[str] = (),
) -> RunPlan:
    """Complete a plan from what `resolve` has decided, without checks; ranks do it, too.

    Args:
        config: The configuration, in which `precision` is decided.
        architecture: The network.
        grid: Degrees of parallelism.
        batch: The batch triple.
        precision: The number format.
        vocab_size: Ids of the tokenizer, before padding.
        notes: Notes for people, to which further ones are added.

    Raises:
        ConfigError: A pipeline stage would hold no parameters.
    """
    padded = padded_vocabulary(config, vocab_size, grid.tp_size)
    layers = build_layer_plan(architecture, padded, head_parallelism=config.model.output_layer_parallelism)
    if config.training.lora is not None:
        layers = with_adapters(layers, config)
        notes = (*notes, *_adapter_notes(layers, config))
    stages = _stages(config, layers, grid)
    attention = attention_impls(config)
    setting = memory_setting(config, grid, batch, precision, attention)
    deepspeed, translated = deepspeed_json(config, grid, batch, precision)
    return RunPlan(
        config=config,
        grid=grid,
        batch=batch,
        precision=precision,
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        layers=layers,
        stages=stages,
        memory_setting=setting,
        memory=fullest_stage(layers, stages, setting),
        save_iterations=config.checkpoint.save_iterations(config.training.train_iters),
        deepspeed=deepspeed,
        notes=(*notes, *translated, *map(str, notes_without_effect(config))),
        attention=attention,
    )


def _adapter_notes(layers: LayerPlan, config: NeoXConfig) -> list[str]:
    """Return what `lora` trains. Raises ConfigError if no layer has an adapter."""
    trained, total = layers.trained_numel, layers.numel
    if layers.architecture.soft_prompt_tokens:
        rule = "and `soft_prompt_tuning` each train nothing else; give one of them"
        raise ConfigError(config.problem("lora", rule, "soft_prompt_tuning"))
    if not trained:
        raise ConfigError(config.problem("lora", "has targets that no block of this network has"))
    return [f"lora: {trained:,} of {total:,} parameters are trained ({100 * trained / total:.2g} %)"]


def _vocabulary_problems(config: NeoXConfig, vocab_size: int) -> Iterator[Problem]:
    key, explicit = "padded_vocab_size", config.tokenizer.padded_vocab_size
    if vocab_size < 1:
        message = f"a tokenizer of {vocab_size} ids: the vocabulary must hold at least one"
        yield config.problem_about(message, *TOKENIZER_KEYS)
    if explicit is not None and explicit < vocab_size:
        yield config.problem(key, f"is smaller than the tokenizer's {vocab_size} ids; remove it", *TOKENIZER_KEYS)
    if explicit is not None and explicit % config.parallelism.model_parallel_size:
        degree = "model_parallel_size"
        yield config.problem(key, f"is not a multiple of {config.describe_setting(degree)}; remove it", degree)


def _stages(config: NeoXConfig, layers: LayerPlan, grid: Topology) -> tuple[StagePlan, ...]:
    """Return the pipeline stages. Raises ConfigError if a stage would have nothing to train or half of a loss."""
    keys = config.parallelism
    stages = plan_stages(layers, grid.pp_size, keys.pipe_partition_method, keys.pipeline_schedule, grid.tp_size)
    last_head = len(layers) - 1
    if any(stage.holds(last_head) and not stage.holds(layers.head.index) for stage in stages):
        rule = "divides the heads of one loss over stages; use type:transformer"
        raise ConfigError(config.problem("pipe_partition_method", rule))
    for stage in stages:
        kinds = {layer.kind for layer in stage.entries(layers)}
        if stage.parameters == 0 or (layers.lora is not None and "block" not in kinds):
            rule = f"leaves stage {stage.index} without parameters to train; use type:transformer|mlp"
            raise ConfigError(config.problem("pipe_partition_method", rule))
    return stages


def solve_grid(config: NeoXConfig, world_size: int, problems: list[Problem]) -> Topology | None:
    """Return the degrees, with dp = world_size / (pp x mp); a world that cannot be divided goes to `problems`."""
    tp_size = config.parallelism.model_parallel_size
    pp_size = max(1, config.parallelism.pipe_parallel_size)  # NeoX's 0 and 1 both mean one stage
    copy = pp_size * tp_size
    if world_size < 1 or world_size % copy:
        near = sorted({n for n in (world_size // copy * copy, -(-world_size // copy) * copy) if n > 0} or {copy})
        keys = ("pipe_parallel_size", "model_parallel_size")
        degrees = " x ".join(map(config.describe_setting, keys))
        message = (
            f"{world_size} GPUs cannot be divided into copies of the model on {copy}: {degrees}; "
            f"use {' or '.join(map(str, near))} GPUs, or other degrees"
        )
        problems.append(Problem(keys, message))
        return None
    return Topology(pp_size, world_size // copy, tp_size, tp_size > 1 and config.parallelism.sequence_parallel)


def solve_batch(config: NeoXConfig, dp_size: int | None, problems: list[Problem]) -> BatchPlan | None:
    """Return train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp, in samples.

    Any two of the keys give the third, one alone takes one accumulation step.

    Args:
        config: The batch keys.
        dp_size: Data-parallel ranks; None where the degrees do not fit the world. There is no batch then, but a
            problem where no number of ranks would fit.
        problems: Takes what does not fit, with the nearest values that do.
    """
    ds = config.deepspeed
    total, micro, steps = ds.train_batch_size, ds.train_micro_batch_size_per_gpu, ds.gradient_accumulation_steps
    if total is None and micro is None:
        problems.append(Problem(_BATCH_KEYS, f"the batch size is missing: give {MICRO} (with {STEPS}), or {TOTAL}"))
        return None
    if dp_size is None:
        _check_without_ranks(config, problems)
        return None
    if total is None:
        assert micro is not None
        steps = steps or 1
        return BatchPlan(micro * steps * dp_size, micro, steps)
    if micro is not None and steps is not None:
        if (product := micro * steps * dp_size) == total:
            return BatchPlan(total, micro, steps)
        factors = f"{config.describe_setting(MICRO)} x {config.describe_setting(STEPS)} x {dp_size} data-parallel ranks"
        fits = f"{TOTAL} {product}, or {_nearest(total, micro * dp_size, STEPS)}"
        problems.append(config.problem(TOTAL, f"is not {factors} = {product}; use {fits}", MICRO, STEPS))
        return None
    given, value, missing = (MICRO, micro, STEPS) if micro is not None else (STEPS, steps or 1, MICRO)
    assert value is not None
    rest, remainder = divmod(total, value * dp_size)
    if remainder or not rest:
        unit = config.describe_setting(given) if config.given(given) else f"{given} 1"
        fits = _nearest(total, value * dp_size, missing)
        rule = f"is not a multiple of {unit} x {dp_size} data-parallel ranks; use {fits}"
        problems.append(config.problem(TOTAL, rule, MICRO, STEPS))
        return None
    return BatchPlan(total, value, rest) if given == MICRO else BatchPlan(total, rest, value)


def _check_without_ranks(config: NeoXConfig, problems: list[Problem]) -> None:
    """Any number of data-parallel ranks needs train_batch_size to be a multiple of the other two."""
    total = config.deepspeed.train_batch_size
    given = [key for key in (MICRO, STEPS) if config.value(key) is not None]
    unit = prod(config.value(key) for key in given)
    if total is not None and total % unit:
        factors = " x ".join(map(config.describe_setting, given))
        nearest = max(1, round(total / unit)) * unit
        rule = f"is not a multiple of {factors} on any number of GPUs; use {nearest}"
        problems.append(config.problem(TOTAL, rule, *given))


def _nearest(total: int, unit: int, key: str) -> str:
    """Return the multiple of `unit` nearest to `total`, with the factor it means for `key`."""
    factor = max(1, round(total / unit))
    return f"{TOTAL} {factor * unit} with {key} {factor}"


def encode_payload(plan: RunPlan) -> str:
    """Encode a plan as base64, a few kilobytes whatever its size."""
    data = {
        "config": plan.config.to_flat(),
        "sources": {key: source.to_json() for key, source in plan.config.sources().items()},
        "architecture": plan.architecture.to_dict(),
        "grid": asdict(plan.grid),
        "batch": asdict(plan.batch),
        "precision": plan.precision,
        "vocab_size": plan.vocab_size,
        "digest": plan_digest(plan),
    }
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(data).encode())).decode()


def decode_payload(text: str) -> RunPlan:
    """Return the plan that `encode_payload` encoded.

    Raises:
        ConfigError: The text is no payload.
        LaunchError: Another plan follows from it here than for the launcher.
    """
    try:
        data = json.loads(zlib.decompress(base64.urlsafe_b64decode(text.encode())))
        sources = {key: Source.from_json(source) for key, source in data["sources"].items()}
        plan = derive_plan(
            NeoXConfig.from_flat(data["config"], sources),
            Architecture.from_dict(data["architecture"]),
            Topology(**data["grid"]),
            BatchPlan(**data["batch"]),
            data["precision"],
            data["vocab_size"],
        )
        digest = data["digest"]
    except (binascii.Error, zlib.error, UnicodeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the payload of the launcher cannot be read: {error}") from None
    if plan_digest(plan) != digest:
        raise LaunchError(
            "the plan that follows from the payload on this host is not the launcher's: the code here is another "
            "version; `deepy.py doctor` compares the hosts"
        )
    return plan


def plan_digest(plan: RunPlan) -> str:
    """Hash what ranks must agree on: layers, stages, batch, precision, attention kernels and DeepSpeed's JSON."""
    agreed = (plan.layers, plan.stages, plan.grid, plan.batch, plan.precision, plan.attention, plan.deepspeed)
    return hashlib.sha256(json.dumps(agreed, sort_keys=True, default=vars).encode()).hexdigest()
