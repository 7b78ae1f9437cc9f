"""Derivation of a `RunPlan` from a configuration. Pure: no file, GPU or environment.

    capabilities of the hosts -> precision             ids of the tokenizer -> padded vocabulary
    number of ranks -> grid (parallel sizes)           architecture -> layers -> which parameters are trained
    grid -> batch                                      layers, grid -> stages
    configuration -> architecture                      configuration -> DeepSpeed's JSON, notes
    rules: whatever is wrong is refused, all at once

It runs on the launcher. Ranks get the result as one argument of their command (`payload`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches

from neox.architecture import LayerPlan
from neox.config.decision import Decision, apply_decisions
from neox.config.keys import TOKENIZER_KEYS
from neox.config.neox_config import NeoXConfig
from neox.devices import GPUS, DeviceFamily
from neox.errors import ConfigError
from neox.plan.batches.batch import batch_notes, solve_batch
from neox.plan.batches.batch_schedule import ramp_problems
from neox.plan.deepspeed_json import deepspeed_json
from neox.plan.devices.fp8 import fp8_problems
from neox.plan.devices.precision import (
    UNKNOWN_HOSTS,
    Capabilities,
    choose_precision,
    decide_precision,
)
from neox.plan.network.architecture import architecture_of, padded_vocabulary, plan_layers, used_vocabulary
from neox.plan.network.attention_config import attention_impls
from neox.plan.ranks.stages import Division, StagePlan, plan_stages
from neox.plan.ranks.topology import solve_grid
from neox.plan.rules import notes_without_effect, static_problems
from neox.plan.rules.data_stages import order_problems
from neox.plan.rules.pipeline import schedule_problems
from neox.plan.run_plan import UNKNOWN_AMOUNTS, DataAmounts, RunPlan
from neox.plan.run_start import ChosenStart
from neox.problems import Problem, in_file_order


def resolve(
    config: NeoXConfig,
    world_size: int,
    vocab_size: int,
    capabilities: Capabilities = UNKNOWN_HOSTS,
    *,
    decisions: Sequence[Decision] | None = None,
    device_family: DeviceFamily | None = None,
    amounts: DataAmounts = UNKNOWN_AMOUNTS,
    start: ChosenStart | None = None,
) -> RunPlan:
    """Derive the plan of a run.

    Args:
        config: What the user asked for, with what a start has decided.
        world_size: Number of ranks.
        vocab_size: Number of ids the tokenizer can produce.
        capabilities: What the hosts can do, which decides `precision: auto` and whether `fp8` works.
        decisions: Decisions of a start, for people; None if this is no start, and `precision: auto` is not decided.
        device_family: Kind of device that kernels are planned for, if it is known.
        amounts: Amounts of data, if they are known.
        start: How a training starts.

    Returns:
        The plan; its configuration names the precision that was decided.

    Raises:
        ConfigError: Every rule that the configuration breaks.
    """
    capabilities = _with_gpu_type(config, capabilities)
    notes: list[str] = []
    if decisions is None:  # no start: nobody has looked at the hosts yet
        precision_decided = decide_precision(config, capabilities)
        decisions = precision_decided.decisions
        notes += precision_decided.notes
        config = apply_decisions(config, decisions)

    # Rules: whatever is wrong is refused, all at once.
    problems = static_problems(config)
    precision = choose_precision(config, [])  # a contradiction is among the problems above
    grid = solve_grid(config, world_size, problems)
    batch = solve_batch(config, None if grid is None else grid.data_size, problems)
    if batch is not None:  # what follows from a batch
        problems += ramp_problems(config, batch)
        problems += schedule_problems(config, grid, batch)
    if batch is not None and not problems:
        problems += order_problems(config, batch)
    used = used_vocabulary(config, vocab_size)
    problems += _vocabulary_problems(config, used)
    if problems or grid is None or batch is None or precision is None:
        raise ConfigError(in_file_order(problems))
    if used != vocab_size:
        which = f"id {used} has" if vocab_size == used + 1 else f"ids {used} to {vocab_size - 1} have"
        notes.append(
            f"the tokenizer has {vocab_size:,} ids, and the imported model's embedding {used:,} rows: {which} no row, "
            "and text that holds them is refused (tools/resize_vocabulary.py gives them rows)"
        )

    # Layers: names, full shapes, split dimensions and initial values of all parameters.
    padded = padded_vocabulary(config, used, grid.tp_size)
    layers = plan_layers(config, architecture_of(config), padded, used)
    notes += _trained_share_notes(layers, config)

    # Stages: consecutive ranges of layers, as the pipeline schedule needs them.
    stages = plan_stages(layers, grid.pp_size, Division.of(config), grid.tp_size)
    _check_stages(config, layers, stages)

    deepspeed, translated = deepspeed_json(config, grid, batch, precision)
    notes += [*translated, *batch_notes(config, batch), *map(str, notes_without_effect(config))]
    plan = RunPlan(
        config=config,
        grid=grid,
        batch=batch,
        precision=precision,
        vocab_size=used,
        padded_vocab_size=padded,
        layers=layers,
        stages=stages,
        deepspeed=deepspeed,
        attention=attention_impls(config),
        notes=tuple(notes),
        decisions=tuple(decisions),
        device_family=device_family,
        amounts=amounts,
        start=start,
    )
    fp8_refusals = list(fp8_problems(plan, capabilities))  # shapes of weights on a tensor rank
    if fp8_refusals:
        raise ConfigError(fp8_refusals)
    return plan


def _with_gpu_type(config: NeoXConfig, known: Capabilities) -> Capabilities:
    """Return capabilities in which the kind of GPU that is planned for answers, if no host was asked."""
    gpu_type = config.runner.gpu_type
    if gpu_type is None or known.family is not None or known.bf16 is not None:
        return known
    gpu = GPUS[gpu_type]
    if {"bf16", "fp8", "fp8_experts"} <= set(gpu.formats):
        return known
    return replace(
        known,
        bf16=known.bf16 if "bf16" in gpu.formats else False,
        fp8=known.fp8 if "fp8" in gpu.formats else False,
        fp8_experts=known.fp8_experts if "fp8_experts" in gpu.formats else False,
        devices=f"{gpu.name} (`gpu_type`)",
    )


_EARLIER_TARGETS = frozenset({"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "in_proj", "out_proj"})
"""Targets of `lora` that earlier versions took, whether or not a network has all of them."""
_NAMES_OF_PROJECTIONS = (
    "q_proj, k_proj and v_proj are `query_key_value` here, o_proj is `dense`, gate_proj and up_proj are "
    "`dense_h_to_4h`, and down_proj is `dense_4h_to_h`; of latent attention, q_a_proj is `query_down`, q_b_proj is "
    "`query_up`, q_proj is `query`, kv_a_proj_with_mqa is `key_value_down`, and kv_b_proj is `key_value_up`"
)
"""What Hugging Face's names of linear layers are here."""


def _trained_share_notes(layers: LayerPlan, config: NeoXConfig) -> Iterator[str]:
    """Yield how much of the network `lora` or `train_only_added_tokens` trains.

    Raises:
        ConfigError: `lora` has nothing to train, or two such keys are given.
    """
    if config.training.lora is not None:
        if layers.architecture.soft_prompt_tokens:
            rule = "and `soft_prompt_tuning` each train nothing else; give one of them"
            raise ConfigError(config.problem("lora", rule, "soft_prompt_tuning"))
        known = {spec.name.split(".")[-2] for spec in layers.adaptable_linears}
        targets = config.training.lora.target
        unknown = [target for target in targets if target not in known]
        if known.intersection(targets) and _EARLIER_TARGETS.issuperset(targets):
            if unknown:  # runs of earlier versions must go on
                yield f"lora.target: no block of this network has {', '.join(unknown)}"
        elif unknown:
            rule = f"has targets that no block of this network has: {', '.join(unknown)}"
            near = [f"`{name}`" for target in unknown for name in get_close_matches(target, sorted(known), n=1)]
            if near:
                rule += f"; did you mean {' and '.join(near)}?"
            rule += f" Its linear layers are {', '.join(sorted(known))}"
            if any(target.endswith("_proj") for target in unknown):
                rule += f" ({_NAMES_OF_PROJECTIONS})"
            raise ConfigError(config.problem("lora", rule, "attention_config"))
        trained = layers.trained_numel
        percentage = 100 * trained / layers.numel
        yield f"lora: {trained:,} of {layers.numel:,} parameters are trained ({percentage:.2g} %)"
        added = len(config.tokenizer.added_tokens)
        if added:
            yield (
                f"lora freezes the embedding and the head, so the {added} added_tokens keep the rows that they have; "
                "train new tokens before (train_only_added_tokens), or all weights"
            )
    if config.tokenizer.train_only_added_tokens:
        rows = len(config.tokenizer.added_tokens)
        trained = 0
        for spec in layers.parameters:
            if spec.trained:
                trained += spec.numel // spec.shape[0] * rows
        yield f"train_only_added_tokens: {trained:,} of {layers.numel:,} parameters are trained, without weight decay"


def _check_stages(config: NeoXConfig, layers: LayerPlan, stages: Sequence[StagePlan]) -> None:
    """Raise ConfigError if the heads of one loss are on two stages, or if a stage has nothing to train."""
    key = "pipe_partition_method"
    last_head = len(layers) - 1
    for stage in stages:
        if stage.holds(last_head) and not stage.holds(layers.head.index):
            rule = "divides the heads of one loss over stages; use type:transformer"
            raise ConfigError(config.problem(key, rule))
    for stage in stages:
        for layer_range in stage.ranges:
            in_range = replace(stage, ranges=(layer_range,)).parameter_specs(layers)
            if any(spec.trained for spec in in_range):
                continue
            where = f"stage {stage.index}"
            if len(stage.ranges) > 1:
                where = f"a range of layers of stage {stage.index}"
            rule = f"leaves {where} without parameters to train; use type:transformer|mlp"
            if config.tokenizer.train_only_added_tokens:
                rule = (
                    f"leaves {where} without parameters to train: with train_only_added_tokens only the embedding and "
                    "the head have some; use pipe_parallel_size 1, or 2 with pipeline_schedule: 1f1b"
                )
                raise ConfigError(config.problem(key, rule, "train_only_added_tokens", "pipe_parallel_size"))
            if config.optimizer.parameter_groups:
                problem = config.problem(key, f"{rule}, or freeze less", "parameter_groups", "pipe_parallel_size")
                raise ConfigError(problem)
            raise ConfigError(config.problem(key, rule))


def _vocabulary_problems(config: NeoXConfig, vocab_size: int) -> Iterator[Problem]:
    """Yield what is wrong with the sizes of the vocabulary."""
    if vocab_size < 1:
        message = f"a tokenizer of {vocab_size} ids: the vocabulary must hold at least one"
        yield config.problem_about(message, *TOKENIZER_KEYS)
    added = len(config.tokenizer.added_tokens)
    if added and added >= vocab_size:
        yield config.problem("added_tokens", f"are more than the {vocab_size} ids of the vocabulary", *TOKENIZER_KEYS)
    key = "padded_vocab_size"
    explicit = config.tokenizer.padded_vocab_size
    if explicit is None:
        return
    if explicit < vocab_size:
        yield config.problem(key, f"is smaller than the tokenizer's {vocab_size} ids; remove it", *TOKENIZER_KEYS)
    if explicit % config.parallelism.model_parallel_size:
        degree = "model_parallel_size"
        yield config.problem(key, f"is not a multiple of {config.describe_setting(degree)}; remove it", degree)
