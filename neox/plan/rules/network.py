"""Rules of the network's shapes: what must divide what, and lengths."""

from __future__ import annotations

from collections.abc import Iterator

from neox.architecture import rope_scaling_problem
from neox.config.neox_config import NeoXConfig
from neox.plan.network.architecture_keys import rotated_dimensions, size_of_head
from neox.plan.network.attention_config import asked_kinds, only_recurrent
from neox.plan.network.expert_keys import expert_blocks
from neox.plan.network.mlp_width import mlp_width
from neox.problems import Problem

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
_TENSOR_RANKS = "model_parallel_size"


def network_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about the network that are broken."""
    for key in REQUIRED:
        if key == "num_attention_heads" and only_recurrent(config):
            continue
        if config.value(key) is None:
            yield config.problem_about(f"`{key}` is missing: every model needs it", key)
    yield from _heads(config)
    yield from _rotary(config)
    yield from _unrotated(config)
    yield from _mlp(config)
    yield from _lengths(config)


def _heads(config: NeoXConfig) -> Iterator[Problem]:
    model = config.model
    heads = model.num_attention_heads
    if heads is None or only_recurrent(config):
        return
    degree = config.describe_setting(_TENSOR_RANKS)
    if heads % config.parallelism.model_parallel_size:
        divisors = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        rule = f"cannot be divided over {degree}; use a degree among {divisors}"
        yield config.problem("num_attention_heads", rule, _TENSOR_RANKS)
    if model.num_kv_heads and heads % model.num_kv_heads:
        queries = config.describe_setting("num_attention_heads")
        yield config.problem("num_kv_heads", f"does not divide {queries}; use a divisor of that", "num_attention_heads")
    elif model.num_kv_heads and model.num_kv_heads % config.parallelism.model_parallel_size:
        rule = f"cannot be divided over {degree}; use at most that many tensor ranks"
        yield config.problem("num_kv_heads", rule, _TENSOR_RANKS)
    if model.hidden_size is not None and model.hidden_size % heads and model.head_dim is None:
        queries = config.describe_setting("num_attention_heads")
        nearest = nearest_multiples(model.hidden_size, heads)
        rule = f"is not a multiple of {queries}; the nearest multiples are {nearest}; or give head_dim"
        yield config.problem("hidden_size", rule, "num_attention_heads", "head_dim")


def nearest_multiples(size: int, unit: int) -> str:
    """Return the multiples of `unit` next to a size, without 0, as text."""
    below = size // unit * unit
    above = below + unit
    return f"{below} or {above}" if below else str(above)


def _rotary(config: NeoXConfig) -> Iterator[Problem]:
    model = config.model
    if model.pos_emb != "rotary" or model.hidden_size is None or model.num_attention_heads is None:
        return
    if only_recurrent(config):
        return
    if model.hidden_size % model.num_attention_heads and model.head_dim is None:
        return  # the rule of heads reports it
    sizes = (model.hidden_size, model.num_attention_heads, model.head_dim)
    rotated = rotated_dimensions(model.rotary_pct, *sizes)
    if rotated < 2 or rotated % 2:
        count = f"rotates {rotated} of the {size_of_head(*sizes)} dimensions of a head"
        others = ("hidden_size", "num_attention_heads", "head_dim", "pos_emb")
        yield config.problem("rotary_pct", f"{count}; it must be an even number of at least 2", *others)
        return
    if model.rope_scaling and (problem := rope_scaling_problem(model.rope_scaling, rotated)):
        yield config.problem("rope_scaling", problem)


def _unrotated(config: NeoXConfig) -> Iterator[Problem]:
    blocks = config.model.no_rotary_layers
    layers = config.model.num_layers
    if len(set(blocks)) < len(blocks):
        yield config.problem("no_rotary_layers", "names a block twice")
    if layers is not None and max(blocks, default=0) >= layers:
        depth = config.describe_setting("num_layers")
        yield config.problem("no_rotary_layers", f"must be numbers from 0 to {layers - 1}; {depth}", "num_layers")


def _mlp(config: NeoXConfig) -> Iterator[Problem]:
    model = config.model
    if model.hidden_size is None or not _has_mlp_of_model_width(config):
        return
    width = mlp_width(
        model.hidden_size,
        model.activation,
        model.intermediate_size,
        model.expansion_factor,
        model.mlp_multiple_of,
        model.mlp_width,
    )
    if width and width % config.parallelism.model_parallel_size == 0:
        return
    ranks = config.describe_setting(_TENSOR_RANKS)
    size = f"the MLP's inner width is {width} (activation {model.activation})"
    keys = ("mlp_width", "intermediate_size", "expansion_factor", "mlp_multiple_of", "hidden_size", "activation")
    yield Problem((*keys, _TENSOR_RANKS), f"{size}, which cannot be divided over {ranks}; give mlp_width")


def _has_mlp_of_model_width(config: NeoXConfig) -> bool:
    """Return whether any block's MLP, or the experts, have the width that follows from the model's keys."""
    kinds = asked_kinds(config).values()
    if kinds and not any(kind.two_sublayers for kind in kinds):
        return False
    experts = config.experts
    layers = config.model.num_layers or 0
    if experts.moe_num_experts == 1 or experts.moe_ffn_hidden_size is None:
        return True
    blocks = expert_blocks(layers, experts.moe_expert_interval, experts.moe_layer_freq, experts.moe_first_k_dense)
    return len(blocks) < layers


def _lengths(config: NeoXConfig) -> Iterator[Problem]:
    model = config.model
    if model.seq_length and model.max_position_embeddings and model.seq_length > model.max_position_embeddings:
        longest = config.describe_setting("max_position_embeddings")
        yield config.problem("seq_length", f"is longer than {longest}; raise the second", "max_position_embeddings")
    elif model.seq_length and model.pos_emb == "learned" and model.opt_pos_emb_offset:
        yield from _table_of_positions(config, model.seq_length)
    if model.pos_emb == "rpe" and model.rpe_max_distance <= model.rpe_num_buckets // 2:
        buckets = config.describe_setting("rpe_num_buckets")
        rule = f"must be above half of {buckets}, which hold one distance each"
        yield config.problem("rpe_max_distance", rule, "rpe_num_buckets", "pos_emb")
    if model.pos_emb == "sinusoidal" and (model.hidden_size or 0) % 2:
        yield config.problem("hidden_size", "is odd; `pos_emb: sinusoidal` needs as many sines as cosines", "pos_emb")


def _table_of_positions(config: NeoXConfig, seq_length: int) -> Iterator[Problem]:
    model = config.model
    needed = seq_length + model.opt_pos_emb_offset
    rows = model.max_position_embeddings or seq_length
    if needed > rows:
        length = config.describe_setting("seq_length")
        rule = (
            f"and {length} need a table of {needed} rows; set max_position_embeddings to at least {needed} "
            f"(it is {rows})"
        )
        yield config.problem("opt_pos_emb_offset", rule, "seq_length", "max_position_embeddings", "pos_emb")
