"""Rules of blocks with a recurrent state: what their sizes must divide, and keys without a meaning for them."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.network.architecture import architecture_of
from neox.plan.network.attention_config import asked_kinds, only_recurrent
from neox.plan.network.recurrent_keys import MAMBA2_KINDS, rwkv_head_size, rwkv_mlp_width
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
    yield from _mamba2_heads(config, names)
    yield from _states(config, names)
    yield from _delta_heads(config, names)
    yield from _rwkv_sizes(config, names)
    yield from _without_meaning(config, names)


def indivisible_blocks(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the recurrent blocks that tensor ranks cannot divide, of a configuration that breaks no other rule."""
    degree = config.parallelism.model_parallel_size
    network = architecture_of(config)
    for name, kind in asked_kinds(config).items():
        if kind.keeps != "state":
            continue
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


def _rwkv_sizes(config: NeoXConfig, names: list[str]) -> Iterator[Problem]:
    """Yield heads of time mixing that do not fill its width, and a channel mixing without channels."""
    if "rwkv" not in names:
        return
    keys = config.recurrent
    model = config.model
    hidden = model.hidden_size or 0
    width = keys.dim_att or hidden
    heads = model.num_attention_heads
    size = rwkv_head_size(hidden, keys.dim_att, keys.head_size, heads)
    from_heads = keys.head_size is None and heads is not None
    if width % (heads if from_heads and heads else size):
        key = "num_attention_heads" if from_heads else "head_size"
        rule = f"does not divide the {width} channels of time mixing in blocks rwkv"
        if not config.given(key):
            yield config.problem_about(f"the default `{key}: {size}` {rule}; give it", key, "dim_att", "hidden_size")
        else:
            yield config.problem(key, f"{rule}; use a divisor of that", "dim_att", "hidden_size", _ATTENTION)
    elif only_recurrent(config) and heads is not None and heads * size != width:
        rule = f"and {config.describe_setting('num_attention_heads')} are not the {width} channels of time mixing"
        yield config.problem("head_size", f"{rule}; remove one of them", "num_attention_heads", "dim_att", _ATTENTION)
    if not rwkv_mlp_width(hidden, keys.ffn_dim, model.intermediate_size, model.expansion_factor):
        rule = "is missing: what gpt-neox's rule derives from the other keys, a multiple of 32, is 0"
        yield config.problem_about(f"`ffn_dim` {rule}", "ffn_dim", "hidden_size", "intermediate_size", _ATTENTION)


def _without_meaning(config: NeoXConfig, names: list[str]) -> Iterator[Problem]:
    """Yield keys that would have no effect in a network of recurrent blocks only."""
    if not only_recurrent(config):
        return
    blocks = " and ".join(names)
    if config.given("head_dim"):
        yield config.problem("head_dim", f"has no effect in blocks {blocks}, which have no attention", _ATTENTION)
    has_mlp = any(kind.two_sublayers for kind in asked_kinds(config).values())
    if has_mlp:
        return
    widths = {"mamba": "mamba_width", "rwkv": "ffn_dim"}
    own = [widths[name] for name in names if name in widths]
    if own and all(config.value(key) is not None for key in own):
        for key in ("intermediate_size", "expansion_factor"):
            if config.given(key):
                yield config.problem(key, f"has no effect next to {' and '.join(own)}; remove one of them", *own)
    if config.given("activation") and config.model.activation not in ("silu", "swish"):
        rule = f"has no effect in blocks {blocks}, whose activation is silu; remove it"
        yield config.problem("activation", rule, _ATTENTION)
