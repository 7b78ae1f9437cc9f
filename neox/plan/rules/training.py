"""Rules of a training: compiled and recomputed layers, checkpoints, profiling."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.compiled import compile_obstacle
from neox.plan.precision import PRECISION_KEYS, choose_precision
from neox.problems import Problem

# More checkpoints than this are a mistake, and listing them would take longer than refusing them.
_MOST_CHECKPOINTS = 100_000


def training_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about training that are broken."""
    yield from _compiled_layers(config)
    yield from _recompute(config)
    yield from _tiles(config)
    yield from _checkpoint(config)
    yield from _profile(config)
    yield from _noise_scale(config)


def _compiled_layers(config: NeoXConfig) -> Iterator[Problem]:
    obstacle = compile_obstacle(config)
    if obstacle is None:
        return
    other, why = obstacle
    wanted = []
    if config.training.compile_layers is True:
        wanted.append("compile_layers")
    if config.training.activation_memory_budget is not None:
        wanted.append("activation_memory_budget")
    for key in wanted:
        yield config.problem(key, f"does not work with {config.describe_setting(other)}, {why}", other)


def _recompute(config: NeoXConfig) -> Iterator[Problem]:
    training = config.training
    layers = config.model.num_layers or 0
    if not training.checkpoint_activations:
        return
    outside = [number for number in training.no_recompute_layers or () if number >= layers]
    if outside:
        message = f"`no_recompute_layers` has {outside[0]}; layers are 0 to {layers - 1}"
        yield config.problem_about(message, "no_recompute_layers", "num_layers")


def _tiles(config: NeoXConfig) -> Iterator[Problem]:
    key = "mlp_tile_size"
    size = config.training.mlp_tile_size
    if size is None:
        return
    ranks = config.parallelism.context_parallel_size
    tokens = (config.model.seq_length or 0) // ranks
    if size >= tokens:
        rule = f"has no effect: a rank has only {tokens} tokens of a sample; use a smaller one, or remove it"
        yield config.problem(key, rule, "seq_length", "context_parallel_size")
    if config.experts.moe_num_experts > 1:
        rule = "does not work with experts, whose losses need all tokens at once; remove one of them"
        yield config.problem(key, rule, "moe_num_experts")


def _checkpoint(config: NeoXConfig) -> Iterator[Problem]:
    key = "checkpoint_factor"
    factor = config.checkpoint.checkpoint_factor
    if factor is None:
        return
    if config.checkpoint.checkpoint_scale == "log":
        if factor == 1:
            rule = "must be above 1 with checkpoint_scale log, which saves at its powers"
            yield config.problem(key, rule, "checkpoint_scale")
        return
    last = config.training.train_iters or 0
    if last // factor > _MOST_CHECKPOINTS:
        larger = -(-last // 100)
        rule = (
            f"over {config.describe_setting('train_iters')} saves {last // factor:,} checkpoints; give a larger one, "
            f"such as {larger}"
        )
        yield config.problem(key, rule, "train_iters", "checkpoint_scale")


def _profile(config: NeoXConfig) -> Iterator[Problem]:
    keys = config.logging
    if not (keys.profile or keys.memory_profiling):
        return
    if keys.profile_step_start >= keys.profile_step_stop:
        stop = config.describe_setting("profile_step_stop")
        rule = f"is not below {stop}, before which profiling ends"
        yield config.problem("profile_step_start", rule, "profile_step_stop")
    if keys.memory_profiling and keys.memory_profiling_path is None and keys.log_dir is None:
        rule = "needs log_dir or memory_profiling_path; give a directory for the files"
        yield config.problem("memory_profiling", rule, "log_dir", "memory_profiling_path")


def _noise_scale(config: NeoXConfig) -> Iterator[Problem]:
    if not config.logging.log_gradient_noise_scale or config.deepspeed.zero_optimization.stage:
        return
    if config.parallelism.pipe_parallel_size > 1 and choose_precision(config, []) == "bf16":
        stages = config.describe_setting("pipe_parallel_size")
        rule = (
            f"does not work with bf16 and {stages}, where gradients are clipped and divided over ranks first; "
            "use pipe_parallel_size 1 or fp16, or remove it"
        )
        yield config.problem("log_gradient_noise_scale", rule, "pipe_parallel_size", *PRECISION_KEYS)
