"""Rules of a training: compiled and recomputed layers, checkpoints, profiling."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.devices.compiled import compile_obstacle
from neox.problems import Problem

# More checkpoints than this are a mistake, and listing them would take longer than refusing them.
_MOST_CHECKPOINTS = 100_000


def training_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about training that are broken."""
    yield from _compiled_layers(config)
    yield from _recompute(config)
    yield from _tiles(config)
    yield from _checkpoint(config)


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
