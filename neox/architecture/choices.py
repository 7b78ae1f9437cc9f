"""Choices of a network on paper: activations, norms, positions and attention, by their names in the YAML.

Each table's keys are the values that the YAML accepts. How a choice is computed is the entry of the same name in
`neox.ops` (`ACTIVATIONS`, `NORMS`) or `neox.model` (`POSITIONS`, `ATTENTION`, `MLPS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from neox.architecture.activations import ACTIVATIONS
from neox.architecture.architecture import Architecture
from neox.architecture.experts import expert_losses, expert_parameters, expert_statistics
from neox.architecture.parameter import Initialization, ParameterSpec, in_module
from neox.architecture.sparsity import SPARSITY


@dataclass(frozen=True)
class Norm:
    """A normalisation over the hidden dimension.

    Attributes:
        parameters: Hidden size -> parameters, named inside the norm.
        epsilon_key: Key of its epsilon in the YAML; None for a norm without one.
        by_steps: Whether it is computed in fp32 by single operations, which keep two fp32 tensors instead of its input.
        of_heads: Whether gpt-neox's `use_qk_layernorm` can apply it to the heads of queries and keys.
        from_zero: Whether it multiplies by 1 + its scale, which begins at 0.
    """

    parameters: Callable[[int], tuple[ParameterSpec, ...]]
    epsilon_key: str | None = "layernorm_epsilon"
    by_steps: bool = False
    of_heads: bool = False
    from_zero: bool = False


def _no_names(architecture: Architecture) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class MLPKind:
    """A kind of MLP in a block.

    Attributes:
        parameters: Network -> parameters, named inside the block.
        losses: Network -> names of the losses that it adds to the objective's.
        statistics: Network -> names of numbers that it reports with them, which are not trained.
    """

    parameters: Callable[[Architecture], tuple[ParameterSpec, ...]]
    losses: Callable[[Architecture], tuple[str, ...]] = _no_names
    statistics: Callable[[Architecture], tuple[str, ...]] = _no_names


def _none(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    return ()


@dataclass(frozen=True)
class Positions:
    """How positions enter the network.

    Attributes:
        rotates: Whether queries and keys are transformed, so that both forms are kept for the backward pass.
        biases_scores: Whether scores are changed, so that every kernel reads a number for each of them.
        embedding: Its parameters in layer 0, next to the word embeddings.
        shared: Its parameters that all blocks use, named inside each.
    """

    rotates: bool = False
    biases_scores: bool = False
    embedding: Callable[[Architecture], tuple[ParameterSpec, ...]] = _none
    shared: Callable[[Architecture], tuple[ParameterSpec, ...]] = _none


def _head_dim(architecture: Architecture) -> int:
    return architecture.head_dim


def _keys_and_values(architecture: Architecture, tp_size: int) -> int:
    """Return the number of elements of one token's keys and values on a tensor rank."""
    return 2 * architecture.attended_heads * architecture.head_dim // tp_size


@dataclass(frozen=True)
class Attention:
    """The attention of one block.

    Attributes:
        parameters: Its parameters, named inside the block.
        keys_per_query: (network, sequence length) -> keys that one query is multiplied with, a causal mask not
            subtracted (as Megatron-LM counts, arXiv:2104.04473).
        value_width: Network -> width of a head's values.
        cached: (network, tensor ranks) -> number of elements that generation caches per token on one rank.
    """

    parameters: Callable[[Architecture], tuple[ParameterSpec, ...]]
    keys_per_query: Callable[[Architecture, int], int]
    value_width: Callable[[Architecture], int] = _head_dim
    cached: Callable[[Architecture, int], int] = _keys_and_values


def norm_parameters(architecture: Architecture, module: str) -> tuple[ParameterSpec, ...]:
    """Return the parameters of one of the network's norms over hidden states, as those of a module."""
    return in_module(module, NORMS[architecture.norm].parameters(architecture.hidden_size))


def row_parallel_bias(name: str, architecture: Architecture) -> ParameterSpec:
    """Return the bias of a linear layer whose input is split over tensor ranks: one copy, added after the reduction."""
    shape = (architecture.hidden_size,)
    return ParameterSpec(name, shape, init="zeros", summed_in_neox=architecture.parallel_residual)


def _layernorm(hidden: int) -> tuple[ParameterSpec, ...]:
    return (
        ParameterSpec("weight", (hidden,), init="ones"),
        ParameterSpec("bias", (hidden,), init="zeros"),
    )


def _layernorm_weight(hidden: int) -> tuple[ParameterSpec, ...]:
    return (ParameterSpec("weight", (hidden,), init="ones"),)


def _scale_minus_one(hidden: int) -> tuple[ParameterSpec, ...]:
    return (ParameterSpec("scale", (hidden,), init="zeros"),)


def _scale(hidden: int) -> tuple[ParameterSpec, ...]:
    return (ParameterSpec("scale", (hidden,), init="ones"),)


def _length(hidden: int) -> tuple[ParameterSpec, ...]:
    return (ParameterSpec("g", (1,), init="ones"),)


def _self_attention(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Fused projection, norms of queries and keys, and output projection.

    Rows of the fused projection are [heads, 3, head_dim], or all queries, all keys, all values if there are fewer
    heads of keys and values.
    """
    hidden = architecture.hidden_size
    queries = architecture.num_attention_heads * architecture.head_dim
    keys = architecture.num_kv_heads * architecture.head_dim
    rows = queries + 2 * keys
    sections: tuple[int, ...] = ()
    if keys < queries:
        sections = (queries, keys, keys)
    projection = [ParameterSpec("attention.query_key_value.weight", (rows, hidden), 0, sections=sections)]
    if architecture.qkv_bias:
        bias = ParameterSpec("attention.query_key_value.bias", (rows,), 0, init="zeros", sections=sections)
        projection.append(bias)
    output = [ParameterSpec("attention.dense.weight", (hidden, queries), 1, init="output_weight")]
    if architecture.attention_output_bias:
        output.append(row_parallel_bias("attention.dense.bias", architecture))
    sinks = []
    if architecture.attention_sinks:
        sinks.append(ParameterSpec("attention.sinks", (architecture.num_attention_heads,), 0, init="zeros"))
    return (*sinks, *projection, *_query_key_norms(architecture), *output)


def _latent_attention(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Down projections to latent vectors, their norms, up projections to heads, and the output projection.

    Order of rows. Queries: for each head, the rotary dimensions, then the others. Down projection of keys and values:
    the latent vector, then the rotary key of all heads. Up projection: for each head, its other key dimensions, then
    its values.
    """
    hidden = architecture.hidden_size
    heads = architecture.num_attention_heads
    latent = architecture.latent_width
    rotated = architecture.rotary_ndims
    values = architecture.value_head_dim
    queries = heads * architecture.head_dim
    rows = heads * (architecture.head_dim - rotated + values)
    width = architecture.query_latent_width
    parameters = []
    if architecture.attention_sinks:
        parameters.append(ParameterSpec("attention.sinks", (heads,), 0, init="zeros"))
    if width:
        parameters += [
            ParameterSpec("attention.query_down.weight", (width, hidden)),
            ParameterSpec("attention.query_norm.scale", (width,), init="ones"),
            ParameterSpec("attention.query_up.weight", (queries, width), 0),
        ]
    else:
        parameters.append(ParameterSpec("attention.query.weight", (queries, hidden), 0))
    parameters += [
        ParameterSpec("attention.key_value_down.weight", (latent + rotated, hidden)),
        ParameterSpec("attention.key_value_norm.scale", (latent,), init="ones"),
        ParameterSpec("attention.key_value_up.weight", (rows, latent), 0),
        ParameterSpec("attention.dense.weight", (hidden, heads * values), 1, init="output_weight"),
    ]
    if architecture.attention_output_bias:
        parameters.append(row_parallel_bias("attention.dense.bias", architecture))
    return tuple(parameters)


def _query_key_norms(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Return the parameters of norms of queries and keys."""
    return QUERY_KEY_NORMS[architecture.qk_norm](architecture)


def _neox_query_key_norm(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Return those of the network's norm over each head, with a scale for every head of queries."""
    shape = (architecture.num_attention_heads, architecture.head_dim)
    parameters = NORMS[architecture.norm].parameters(architecture.head_dim)
    of_heads = [replace(spec, shape=shape, partition_dim=0, of_norm=True) for spec in parameters]
    return in_module("attention.qk_layernorm", of_heads)


def _norms_of_heads(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Return the scales of one head of queries, and one of keys."""
    size = (architecture.head_dim,)
    init: Initialization = "ones"
    if NORMS[architecture.norm].from_zero:
        init = "zeros"
    return (
        ParameterSpec("attention.q_norm.scale", size, init=init),
        ParameterSpec("attention.k_norm.scale", size, init=init),
    )


def _norms_over_heads(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Return the scales of all heads of queries, and of all heads of keys."""
    queries = architecture.num_attention_heads * architecture.head_dim
    keys = architecture.num_kv_heads * architecture.head_dim
    return (
        ParameterSpec("attention.q_norm.scale", (queries,), 0, init="ones"),
        ParameterSpec("attention.k_norm.scale", (keys,), 0, init="ones"),
    )


QUERY_KEY_NORMS: Mapping[str, Callable[[Architecture], tuple[ParameterSpec, ...]]] = MappingProxyType(
    {"none": _none, "neox": _neox_query_key_norm, "head": _norms_of_heads, "full": _norms_over_heads}
)
"""Norm of queries and keys -> its parameters, named inside the block.

- `none`: no norm.
- `neox`: the network's norm, over the dimensions of each head (rmsnorm) or of all heads (layernorm). Keys are repeated
  first, and one scale [heads, head_dim] serves queries and keys (later gpt-neox, the key `use_qk_layernorm`).
- `head`: RMSNorm over the dimensions of each head, with one scale [head_dim] for queries and one for keys (Qwen3). With
  `rmsnorm_1p` as the network's norm, theirs are 1 + scale, too (Gemma 3).
- `full`: RMSNorm over the dimensions of all heads, with scales of that width (OLMo-2).
"""


def _mlp(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Two products. The rows of a gated activation's first one are those that are multiplied, then the gates."""
    hidden = architecture.hidden_size
    width = architecture.mlp_width
    factor = ACTIVATIONS[architecture.activation].width_factor
    rows = width * factor
    sections: tuple[int, ...] = ()
    if factor > 1:
        sections = (width,) * factor
    first = [ParameterSpec("mlp.dense_h_to_4h.weight", (rows, hidden), 0, sections=sections)]
    last = [ParameterSpec("mlp.dense_4h_to_h.weight", (hidden, width), 1, init="output_weight")]
    if architecture.mlp_bias:
        first.append(ParameterSpec("mlp.dense_h_to_4h.bias", (rows,), 0, init="zeros", sections=sections))
        last.append(row_parallel_bias("mlp.dense_4h_to_h.bias", architecture))
    return (*first, *last)


def _learned_positions(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    return (ParameterSpec("position_embeddings.weight", (architecture.max_positions, architecture.hidden_size)),)


NORMS: Mapping[str, Norm] = MappingProxyType(
    {
        "layernorm": Norm(_layernorm, of_heads=True),
        "rmsnorm": Norm(_scale, "rms_norm_epsilon", of_heads=True),
        "rmsnorm_1p": Norm(_scale_minus_one, "rms_norm_epsilon", from_zero=True),
        "layernorm_no_bias": Norm(_layernorm_weight),
        "rmsnorm_v2.0": Norm(_scale, "rms_norm_epsilon", by_steps=True),
        "scalenorm": Norm(_length, "scalenorm_epsilon", by_steps=True),
        "non_parametric_layernorm": Norm(lambda hidden: ()),
    }
)
TRANSFORMER_ENGINE_NORMS: Mapping[str, str] = MappingProxyType({"te_layernorm": "layernorm", "te_rmsnorm": "rmsnorm"})
"""Names of Transformer Engine's norms -> the norms that they compute."""


def _relative_positions(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    shape = (architecture.rpe_buckets, architecture.num_attention_heads)
    return (ParameterSpec("attention.rpe.weight", shape, 1, init="xavier_normal"),)


POSITIONS: Mapping[str, Positions] = MappingProxyType(
    {
        "learned": Positions(embedding=_learned_positions),
        "rotary": Positions(rotates=True),
        "sinusoidal": Positions(),
        "rpe": Positions(biases_scores=True, shared=_relative_positions),
        "alibi": Positions(biases_scores=True),
        "none": Positions(),
    }
)
# Sparse kinds are counted whole, like the later tokens of causal attention.
_SELF_ATTENTION = Attention(_self_attention, lambda _, length: length)
ATTENTION: Mapping[str, Attention] = MappingProxyType(
    {
        **dict.fromkeys(("global", *SPARSITY), _SELF_ATTENTION),
        "latent": Attention(
            _latent_attention,
            lambda _, length: length,
            value_width=lambda network: network.value_head_dim,
            cached=lambda network, _: network.latent_width + network.rotary_ndims,
        ),
        "sliding_window": Attention(_self_attention, lambda network, length: min(network.window, length)),
    }
)
MLPS: Mapping[str, MLPKind] = MappingProxyType(
    {"dense": MLPKind(_mlp), "experts": MLPKind(expert_parameters, expert_losses, expert_statistics)}
)


def block_losses(architecture: Architecture) -> tuple[str, ...]:
    """Return the names of the losses that the network's blocks add to the objective's."""
    names: dict[str, None] = {}
    for kind in architecture.mlp:
        names.update(dict.fromkeys(MLPS[kind].losses(architecture)))
    return tuple(names)


def block_statistics(architecture: Architecture) -> tuple[str, ...]:
    """Return the names of the numbers that the network's blocks report next to losses."""
    names: dict[str, None] = {}
    for kind in architecture.mlp:
        names.update(dict.fromkeys(MLPS[kind].statistics(architecture)))
    return tuple(names)


if TYPE_CHECKING:
    ActivationName: TypeAlias = str
    NormName: TypeAlias = str
    PositionsName: TypeAlias = str
    QueryKeyNormName: TypeAlias = str
else:
    ActivationName = Literal[tuple(ACTIVATIONS)]
    NormName = Literal[(*NORMS, *TRANSFORMER_ENGINE_NORMS)]
    PositionsName = Literal[tuple(POSITIONS)]
    QueryKeyNormName = Literal[tuple(name for name in QUERY_KEY_NORMS if name != "neox")]
