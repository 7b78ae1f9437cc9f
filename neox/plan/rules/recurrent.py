"""Rules of blocks with a recurrent state: what their sizes must divide, and keys without a meaning for them."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.network.architecture import architecture_of
from neox.plan.network.attention_config import asked_kinds, only_recurrent
from neox.plan.network.recurrent_keys import MAMBA2_KINDS
from neox.plan.rules.network import nearest_multiples
from neox.problems import Problem

_ATTENTION = "attention_config"
_TENSOR_RANKS = "model_parallel_size"
_SIZES = ("num_layers", "hidden_size", "seq_length")


def recurrent_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about recurrent blocks that are broken."""
    kinds = asked_kinds(config)
    names = [name for name, kind in kinds.items() if kind.keeps == "state"]
    if not names or any(config.value(key) is None for key in _SIZES):
        return
    problems = [*_mamba2_heads(config, names), *_states(config, names), *_delta_heads(config, names)]
    yield from problems
    if not problems:
        yield from _divided(config, names)
    yield from _without_meaning(config, names)


def _mamba2_heads(config: NeoXConfig, names: list[str]) -> Iterator[Problem]:
    """Yield numbers of heads that do not fit the hidden size, or the groups."""
    if set(names).isdisjoint(MAMBA2_KINDS):
        return
    keys = config.recurrent
    channels = 2 * (config.model.hidden_size or 0)
    if keys.mamba_num_heads is None and channels % keys.mamba_head_dim:
        nearest = nearest_multiples(channels, keys.mamba_head_dim)
        rule = f"does not divide the {channels} channels of a block, 2 x hidden_size; give mamba_num_heads, or channels"
        yield config.problem("mamba_head_dim", f"{rule} of {nearest}", "mamba_num_heads", "hidden_size", _ATTENTION)
        return
    heads = keys.mamba_num_heads or channels // keys.mamba_head_dim
    if heads % keys.mamba_num_groups:
        rule = f"does not divide the {heads} heads of a block; use a divisor of that"
        yield config.problem("mamba_num_groups", rule, "mamba_num_heads", "mamba_head_dim", "hidden_size")


def _states(config: NeoXConfig, names: list[str]) -> Iterator[Problem]:
    """Yield that a network has kinds with states of different sizes by default."""
    of_mamba2 = [name for name in names if name in MAMBA2_KINDS]
    if "mamba" in names and of_mamba2 and config.recurrent.mamba_state_dim is None:
        rule = f"is missing: blocks mamba and {of_mamba2[0]} have different defaults"
        yield config.problem_about(f"`mamba_state_dim` {rule}", "mamba_state_dim", _ATTENTION)


def _delta_heads(config: NeoXConfig, names: list[str]) -> Iterator[Problem]:
    """Yield numbers of value heads that key heads cannot serve equally."""
    keys = config.recurrent
    if "gated_delta" in names and keys.linear_num_value_heads % keys.linear_num_key_heads:
        rule = f"must be a multiple of {config.describe_setting('linear_num_key_heads')}"
        yield config.problem("linear_num_value_heads", rule, "linear_num_key_heads", _ATTENTION)


def _divided(config: NeoXConfig, names: list[str]) -> Iterator[Problem]:
    """Yield what tensor ranks cannot divide."""
    degree = config.parallelism.model_parallel_size
    network = architecture_of(config)
    for name in names:
        kind = asked_kinds(config)[name]
        ranks = config.describe_setting(_TENSOR_RANKS)
        if obstacle := kind.obstacle(network, degree):
            message = f"blocks {name} cannot be divided over {ranks}: {obstacle}"
            yield config.problem_about(message, _TENSOR_RANKS, _ATTENTION)
            continue
        for spec in kind.parameters(network, "dense"):
            if spec.name.startswith("mixer.") and not spec.is_divisible(degree):
                sizes = " + ".join(map(str, spec.sections or (spec.shape[spec.partition_dim or 0],)))
                message = f"blocks {name} cannot be divided over {ranks}: {spec.name} has {sizes} rows or columns"
                yield config.problem_about(message, _TENSOR_RANKS, _ATTENTION)
                break


def _without_meaning(config: NeoXConfig, names: list[str]) -> Iterator[Problem]:
    """Yield keys that would have no effect in a network of recurrent blocks only."""
    if not only_recurrent(config):
        return
    blocks = " and ".join(names)
    if config.given("head_dim"):
        yield config.problem("head_dim", f"has no effect in blocks {blocks}, which have no attention", _ATTENTION)
    if config.recurrent.mamba_width is not None:
        for key in ("intermediate_size", "expansion_factor"):
            if config.given(key) and not any(kind.two_sublayers for kind in asked_kinds(config).values()):
                yield config.problem(key, "has no effect next to mamba_width; remove one of them", "mamba_width")
    has_mlp = any(kind.two_sublayers for kind in asked_kinds(config).values())
    if not has_mlp and config.given("activation") and config.model.activation not in ("silu", "swish"):
        rule = f"has no effect in blocks {blocks}, whose activation is silu; remove it"
        yield config.problem("activation", rule, _ATTENTION)
