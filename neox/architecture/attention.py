"""Attention on paper: its parameters, the keys that a query meets, and what generation caches of a token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from neox.architecture.architecture import Architecture
from neox.architecture.choices import NORMS, row_parallel_bias
from neox.architecture.parameter import ONES, ZEROS, FromKey, ParameterSpec, in_module


def _head_dim(architecture: Architecture) -> int:
    return architecture.head_dim


def _keys_and_values(architecture: Architecture, tp_size: int) -> int:
    """Return the number of elements of one token's keys and values on a tensor rank."""
    return 2 * architecture.attended_heads * architecture.head_dim // tp_size


def _all_keys(architecture: Architecture, sequence: int) -> int:
    return sequence


@dataclass(frozen=True)
class Attention:
    """The attention of one block.

    Attributes:
        parameters: Its parameters, named inside the block.
        sees: The earlier tokens that a query sees: all, those of a window, or those of a pattern of blocks, which may
            differ between heads.
        keys_per_query: (network, sequence length) -> keys that one query is multiplied with. A causal mask is not
            subtracted (as Megatron-LM counts, arXiv:2104.04473); patterns are counted whole.
        takes_softmax: Whether a softmax kernel can compute it, too, which takes no mask of pairs. Others are always
            computed by flash attention.
        value_width: Network -> width of a head's values.
        is_latent: Whether its keys and values are products of a latent vector.
        cached: (network, tensor ranks) -> number of elements that generation caches per token on one rank.
    """

    parameters: Callable[[Architecture], tuple[ParameterSpec, ...]]
    sees: Literal["all", "window", "pattern"] = "all"
    keys_per_query: Callable[[Architecture, int], int] = _all_keys
    takes_softmax: bool = False
    value_width: Callable[[Architecture], int] = _head_dim
    is_latent: bool = False
    cached: Callable[[Architecture, int], int] = _keys_and_values

    def score_flops(self, architecture: Architecture, sequence: int) -> int:
        """Return the operations of scores and weighted values for one token."""
        keys = self.keys_per_query(architecture, sequence)
        widths = architecture.head_dim + self.value_width(architecture)
        return 2 * architecture.num_attention_heads * widths * keys


def _self_attention(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Fused projection, norms of queries and keys, and output projection.

    Rows of the fused projection are [heads, 3, head_dim], or all queries, all keys, all values if there are fewer
    heads of keys and values. Those of a gate of the output follow, [heads, head_dim].
    """
    hidden = architecture.hidden_size
    queries = architecture.num_attention_heads * architecture.head_dim
    keys = architecture.num_kv_heads * architecture.head_dim
    rows = queries + 2 * keys
    sections: tuple[int, ...] = ()
    turns = architecture.num_attention_heads
    if keys < queries:
        sections = (queries, keys, keys)
        turns = 0
    if architecture.attention_output_gate:
        sections = (*(sections or (rows,)), queries)
        rows += queries
    projection = [ParameterSpec("attention.query_key_value.weight", (rows, hidden), 0, sections=sections, turns=turns)]
    if architecture.qkv_bias:
        bias = ParameterSpec("attention.query_key_value.bias", (rows,), 0, init=ZEROS, sections=sections)
        projection.append(bias)
    output = [ParameterSpec("attention.dense.weight", (hidden, queries), 1, init=FromKey.OUTPUT_METHOD)]
    if architecture.attention_output_bias:
        output.append(row_parallel_bias("attention.dense.bias", architecture))
    sinks = []
    if architecture.attention_sinks:
        sinks.append(ParameterSpec("attention.sinks", (architecture.num_attention_heads,), 0, init=ZEROS))
    norms = QUERY_KEY_NORMS[architecture.qk_norm](architecture)
    return (*sinks, *projection, *norms, *output)


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
        parameters.append(ParameterSpec("attention.sinks", (heads,), 0, init=ZEROS))
    if width:
        parameters += [
            ParameterSpec("attention.query_down.weight", (width, hidden), of_whole_linear=True),
            ParameterSpec("attention.query_norm.scale", (width,), init=ONES),
            ParameterSpec("attention.query_up.weight", (queries, width), 0),
        ]
    else:
        parameters.append(ParameterSpec("attention.query.weight", (queries, hidden), 0))
    parameters += [
        ParameterSpec("attention.key_value_down.weight", (latent + rotated, hidden), of_whole_linear=True),
        ParameterSpec("attention.key_value_norm.scale", (latent,), init=ONES),
        ParameterSpec("attention.key_value_up.weight", (rows, latent), 0),
        ParameterSpec("attention.dense.weight", (hidden, heads * values), 1, init=FromKey.OUTPUT_METHOD),
    ]
    if architecture.attention_output_bias:
        parameters.append(row_parallel_bias("attention.dense.bias", architecture))
    return tuple(parameters)


def _neox_query_key_norm(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Return those of the network's norm over each head, with a scale for every head of queries."""
    shape = (architecture.num_attention_heads, architecture.head_dim)
    parameters = NORMS[architecture.norm].parameters(architecture.head_dim)
    of_heads = [replace(spec, shape=shape, partition_dim=0, of_norm=True) for spec in parameters]
    return in_module("attention.qk_layernorm", of_heads)


def _norms_of_heads(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Return the scales of one head of queries, and one of keys."""
    size = (architecture.head_dim,)
    init = ZEROS if NORMS[architecture.norm].from_zero else ONES
    return (
        ParameterSpec("attention.q_norm.scale", size, init=init),
        ParameterSpec("attention.k_norm.scale", size, init=init),
    )


def _norms_over_heads(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Return the scales of all heads of queries, and of all heads of keys."""
    queries = architecture.num_attention_heads * architecture.head_dim
    keys = architecture.num_kv_heads * architecture.head_dim
    return (
        ParameterSpec("attention.q_norm.scale", (queries,), 0, init=ONES),
        ParameterSpec("attention.k_norm.scale", (keys,), 0, init=ONES),
    )


QUERY_KEY_NORMS: Mapping[str, Callable[[Architecture], tuple[ParameterSpec, ...]]] = MappingProxyType(
    {"none": lambda architecture: (), "neox": _neox_query_key_norm, "head": _norms_of_heads, "full": _norms_over_heads}
)
"""Norm of queries and keys -> its parameters, named inside the block.

- `none`: no norm.
- `neox`: the network's norm, over the dimensions of each head (rmsnorm) or of all heads (layernorm). Keys are repeated
  first, and one scale [heads, head_dim] serves queries and keys (later gpt-neox, the key `use_qk_layernorm`).
- `head`: RMSNorm over the dimensions of each head, with one scale [head_dim] for queries and one for keys (Qwen3). With
  `rmsnorm_1p` as the network's norm, theirs are 1 + scale, too (Gemma 3).
- `full`: RMSNorm over the dimensions of all heads, with scales of that width (OLMo-2).
"""

SELF_ATTENTION = Attention(_self_attention, takes_softmax=True)
WINDOWED_ATTENTION = Attention(
    _self_attention, sees="window", keys_per_query=lambda network, length: min(network.window, length)
)
SPARSE_ATTENTION = Attention(_self_attention, sees="pattern")
LATENT_ATTENTION = Attention(
    _latent_attention,
    is_latent=True,
    value_width=lambda network: network.value_head_dim,
    cached=lambda network, _: network.latent_width + network.rotary_ndims,
)

if TYPE_CHECKING:
    QueryKeyNormName: TypeAlias = str
else:
    QueryKeyNormName = Literal[tuple(name for name in QUERY_KEY_NORMS if name != "neox")]
