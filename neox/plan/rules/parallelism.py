"""Rules of parallelism: how layers, tokens and activations are divided over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.ranks.partition import partition_problem
from neox.plan.ranks.pipeline_schedules import ranges_per_stage
from neox.plan.rules.network import nearest_multiples
from neox.problems import Problem

_TENSOR_RANKS = "model_parallel_size"
_DIVIDED_TOKENS = "sequence_parallel"


def parallelism_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about parallelism that are broken."""
    yield from _stages(config)
    yield from _divided_inputs(config)
    yield from _divided_tokens(config)


def _stages(config: NeoXConfig) -> Iterator[Problem]:
    layers = config.model.num_layers
    stages = config.parallelism.pipe_parallel_size
    if layers is not None and stages > layers:
        depth = config.describe_setting("num_layers")
        yield config.problem("pipe_parallel_size", f"is more stages than {depth}; use at most {layers}", "num_layers")
    elif layers is not None and stages > 1:
        yield from _ranges(config, layers, stages)
    if problem := partition_problem(config.parallelism.pipe_partition_method):
        yield config.problem("pipe_partition_method", problem)
    asked = config.value("is_pipe_parallel")
    least = 1 if asked else 2  # gpt-neox's flag is true with a single stage, too
    if asked is not None and bool(asked) != (stages >= least):
        degree = config.describe_setting("pipe_parallel_size")
        rule = f"contradicts {degree}, from which it follows; remove it"
        yield config.problem("is_pipe_parallel", rule, "pipe_parallel_size")


def _ranges(config: NeoXConfig, layers: int, stages: int) -> Iterator[Problem]:
    """Yield that there are fewer blocks than ranges of layers on all stages."""
    keys = config.parallelism
    ranges = ranges_per_stage(keys.pipeline_schedule, stages, keys.virtual_stages)
    if stages * ranges > layers:
        depth = config.describe_setting("num_layers")
        degree = config.describe_setting("pipe_parallel_size")
        rule = f"gives each stage {ranges} ranges of layers, with {degree} more than {depth}; use 1f1b or fewer of them"
        yield config.problem("pipeline_schedule", rule, "virtual_stages", "pipe_parallel_size", "num_layers")


def _divided_inputs(config: NeoXConfig) -> Iterator[Problem]:
    hidden = config.model.hidden_size or 0
    if config.training.partition_activations and hidden % config.parallelism.model_parallel_size:
        ranks = config.describe_setting(_TENSOR_RANKS)
        rule = f"divides vectors of {hidden} numbers over {ranks}; remove it"
        yield config.problem("partition_activations", rule, "hidden_size", _TENSOR_RANKS)


def _divided_tokens(config: NeoXConfig) -> Iterator[Problem]:
    degree = config.parallelism.model_parallel_size
    if not config.parallelism.sequence_parallel or degree == 1:
        return
    ranks = config.describe_setting(_TENSOR_RANKS)
    length = config.model.seq_length or 0
    if length % degree:
        nearest = nearest_multiples(length, degree)
        rule = f"cannot be divided over {ranks} ({_DIVIDED_TOKENS}); use {nearest}, or remove that"
        yield config.problem("seq_length", rule, _TENSOR_RANKS, _DIVIDED_TOKENS)
    for uneven in uneven_lengths(config, degree)[:1]:
        rule = f"needs lengths that divide over {ranks}; one is {uneven}"
        yield config.problem(_DIVIDED_TOKENS, rule, _TENSOR_RANKS, "curriculum_learning", "data_stages")
    if config.training.partition_activations:
        rule = f"has nothing to divide: {_DIVIDED_TOKENS} divides inputs; keep one of them"
        yield config.problem("partition_activations", rule, _DIVIDED_TOKENS)
    prompt = config.model.soft_prompt_tuning
    if prompt is not None and prompt.enabled:
        rule = "does not work with soft_prompt_tuning, whose vectors every rank holds; remove one"
        yield config.problem(_DIVIDED_TOKENS, rule, "soft_prompt_tuning")


def uneven_lengths(config: NeoXConfig, degree: int) -> list[int]:
    """Return lengths of stages and a curriculum, or the numbers they follow from, that a degree does not divide."""
    lengths: list[int | None] = [stage.seq_length for stage in config.data.data_stages or ()]
    curriculum = config.schedule.curriculum_learning
    if curriculum is not None and curriculum.enabled:
        steps = curriculum.schedule_config
        if curriculum.schedule_type == "fixed_discrete":
            lengths += steps.difficulty
        else:
            lengths += [curriculum.max_difficulty, steps.difficulty_step]
    return [length for length in lengths if length and length % degree]
