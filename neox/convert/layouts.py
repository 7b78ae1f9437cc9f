"""Order of rows: one parameter of ours as Hugging Face tensors, and back.

A family names the layout of each module in a `TensorSource`, whose docstring has an example with q_proj, k_proj and
v_proj. `ROWS` has the two functions of each name. On the way in, and in the other direction on the way out:

    q_proj [N D, H]   k_proj [K D, H]   v_proj [K D, H]            tensors of `Family.mappings`
         |                  |                 |
         +------------------+-----------------+
         |
          joined [(N + 2 K) D, H]                                  `from_hf_layout`
          |   interleaved: rows of each head from neighbours to halves
          |   K = N: [3, N, D, H] -> [N, 3, D, H]
          ours [(N + 2 K) D, H]                                    `ROWS["heads"].from_hf`

N query heads, K key heads, D width of a head, H hidden size. A bias has no H.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from neox.architecture import Architecture
from neox.families import TensorSource


def to_hf_layout(tensor: Tensor, source: TensorSource, architecture: Architecture) -> list[Tensor]:
    """Return the Hugging Face tensors that a parameter is made from, one per module of `source`.

    Args:
        tensor: Full parameter, [rows, columns], [rows], or [experts, rows, columns].
        source: Their modules and layout.
        architecture: The network, whose heads the layout may depend on.
    """
    theirs = ROWS[source.layout].to_hf(tensor, source, architecture)
    if source.transpose and tensor.dim() == 2:
        return [each.T.contiguous() for each in theirs]
    return theirs


def from_hf_layout(tensors: Sequence[Tensor], source: TensorSource, architecture: Architecture) -> Tensor:
    """Return a full parameter from its Hugging Face tensors: the inverse of `to_hf_layout`."""
    theirs = list(tensors)
    if source.transpose and tensors[0].dim() == 2:
        theirs = [each.T for each in theirs]
    joined = theirs[0] if len(theirs) == 1 else torch.cat(theirs)
    return ROWS[source.layout].from_hf(joined, source, architecture).contiguous()


class RowLayout(NamedTuple):
    """Order of rows in both directions.

    Attributes:
        to_hf: (our tensor, source, network) -> one tensor per module of the source.
        from_hf: (their tensors joined by rows, source, network) -> our tensor.
    """

    to_hf: Callable[[Tensor, TensorSource, Architecture], list[Tensor]]
    from_hf: Callable[[Tensor, TensorSource, Architecture], Tensor]


def _equal_parts(tensor: Tensor, source: TensorSource, architecture: Architecture) -> list[Tensor]:
    return list(tensor.tensor_split(len(source.modules)))


def _unchanged(joined: Tensor, source: TensorSource, architecture: Architecture) -> Tensor:
    return joined


def _heads_to_hf(tensor: Tensor, source: TensorSource, architecture: Architecture) -> list[Tensor]:
    """Return queries, keys and values: in one tensor or three.

    Ours have rows [heads, 3, head_dim], or all queries, all keys and all values if there are fewer key heads.
    """
    heads = architecture.num_attention_heads
    rest = tensor.shape[1:]
    if architecture.num_kv_heads == heads:
        by_head = tensor.reshape(heads, 3, architecture.head_dim, *rest)  # q0 k0 v0 q1 k1 v1
        tensor = by_head.transpose(0, 1).reshape(tensor.shape)  # q0 q1 k0 k1 v0 v1
    queries, keys, values = tensor.split(_head_rows(architecture))
    if source.interleaved:
        order = _halves_to_neighbours(architecture)
        queries = _reorder_heads(queries, order)
        keys = _reorder_heads(keys, order)
    if len(source.modules) == 3:
        return [queries, keys, values]
    return [torch.cat([queries, keys, values])]


def _heads_from_hf(joined: Tensor, source: TensorSource, architecture: Architecture) -> Tensor:
    """Return our fused tensor: the inverse of `_heads_to_hf`."""
    if source.interleaved:
        order = _halves_to_neighbours(architecture).argsort()
        queries, keys, values = joined.split(_head_rows(architecture))
        joined = torch.cat([_reorder_heads(queries, order), _reorder_heads(keys, order), values])
    heads = architecture.num_attention_heads
    if architecture.num_kv_heads != heads:
        return joined  # q q q q k k v v on both sides
    by_kind = joined.reshape(3, heads, architecture.head_dim, *joined.shape[1:])  # q0 q1 k0 k1 v0 v1
    return by_kind.transpose(0, 1).reshape(joined.shape)  # q0 k0 v0 q1 k1 v1


def _grouped_heads_to_hf(tensor: Tensor, source: TensorSource, architecture: Architecture) -> list[Tensor]:
    """Return one tensor with rows [key heads, query heads of each + 2, head_dim]: queries, then keys, then values."""
    groups = architecture.num_kv_heads
    if groups == architecture.num_attention_heads:
        return [tensor]  # rows [heads, 3, head_dim] on both sides
    by_group = []
    for rows in tensor.split(_head_rows(architecture)):
        by_group.append(rows.reshape(groups, -1, architecture.head_dim, *tensor.shape[1:]))
    return [torch.cat(by_group, dim=1).reshape(tensor.shape)]


def _grouped_heads_from_hf(joined: Tensor, source: TensorSource, architecture: Architecture) -> Tensor:
    """Return our fused tensor: the inverse of `_grouped_heads_to_hf`."""
    groups = architecture.num_kv_heads
    if groups == architecture.num_attention_heads:
        return joined
    by_group = joined.reshape(groups, -1, architecture.head_dim, *joined.shape[1:])
    queries, keys, values = by_group.split((by_group.shape[1] - 2, 1, 1), dim=1)
    rest = joined.shape[1:]
    return torch.cat([part.reshape(-1, *rest) for part in (queries, keys, values)])


def _gated_heads_to_hf(tensor: Tensor, source: TensorSource, architecture: Architecture) -> list[Tensor]:
    """Return queries with the gate of each head, keys and values."""
    qkv, gates = tensor.split((sum(_head_rows(architecture)), _head_rows(architecture)[0]))
    queries, keys, values = _heads_to_hf(qkv, source, architecture)
    by_head = (architecture.num_attention_heads, architecture.head_dim, *tensor.shape[1:])
    queries_and_gates = torch.stack((queries.reshape(by_head), gates.reshape(by_head)), dim=1)  # q0 g0 q1 g1
    return [queries_and_gates.flatten(0, 2), keys, values]


def _gated_heads_from_hf(joined: Tensor, source: TensorSource, architecture: Architecture) -> Tensor:
    """Return our fused tensor: the inverse of `_gated_heads_to_hf`."""
    rows, keys, values = _head_rows(architecture)
    queries_and_gates, rest = joined.split((2 * rows, keys + values))
    by_head = (architecture.num_attention_heads, 2, architecture.head_dim, *joined.shape[1:])
    queries, gates = queries_and_gates.reshape(by_head).unbind(1)
    qkv = _heads_from_hf(torch.cat([queries.flatten(0, 1), rest]), source, architecture)
    return torch.cat([qkv, gates.flatten(0, 1)])


def _delta_rows(tensor: Tensor, architecture: Architecture) -> list[int]:
    """Return the numbers of rows of queries, keys and values, and in a projection of gates, strengths and decays."""
    heads = architecture.linear_value_heads
    keys = architecture.linear_key_heads * architecture.linear_key_dim
    values = heads * architecture.linear_value_dim
    convolved = [keys, keys, values]
    return convolved if tensor.shape[0] == sum(convolved) else [*convolved, values, heads, heads]


def _delta_heads_to_hf(tensor: Tensor, source: TensorSource, architecture: Architecture) -> list[Tensor]:
    """Return all rows of one kind after another. The first tensor has those of several, if there are fewer tensors."""
    rows = _delta_rows(tensor, architecture)
    together = len(rows) - len(source.modules) + 1
    return list(tensor.split([sum(rows[:together]), *rows[together:]]))


def _grouped_delta_heads_to_hf(tensor: Tensor, source: TensorSource, architecture: Architecture) -> list[Tensor]:
    """Return queries, keys, values and gates of each key head, and strengths and decays of each key head."""
    by_head = []
    for part in tensor.split(_delta_rows(tensor, architecture)):
        by_head.append(part.unflatten(0, (architecture.linear_key_heads, -1)))
    return [torch.cat(by_head[:4], dim=1).flatten(0, 1), torch.cat(by_head[4:], dim=1).flatten(0, 1)]


def _grouped_delta_heads_from_hf(joined: Tensor, source: TensorSource, architecture: Architecture) -> Tensor:
    """Return our fused tensor: the inverse of `_grouped_delta_heads_to_hf`."""
    key_heads = architecture.linear_key_heads
    rows = _delta_rows(joined, architecture)
    parts = []
    for of_module, sizes in zip(joined.split((sum(rows[:4]), sum(rows[4:]))), (rows[:4], rows[4:]), strict=True):
        first = 0
        by_head = of_module.unflatten(0, (key_heads, -1))
        for size in sizes:
            parts.append(by_head.narrow(1, first, size // key_heads).flatten(0, 1))
            first += size // key_heads
    return torch.cat(parts)


def _experts_to_hf(tensor: Tensor, source: TensorSource, architecture: Architecture) -> list[Tensor]:
    """Return the modules of each expert of a stack [experts, rows, columns], one expert after another."""
    parts: list[Tensor] = []
    for expert in tensor:
        parts += expert.tensor_split(len(source.modules))
    return parts


def _experts_from_hf(joined: Tensor, source: TensorSource, architecture: Architecture) -> Tensor:
    return joined.unflatten(0, (architecture.num_experts, -1))


def _stacked_experts_to_hf(tensor: Tensor, source: TensorSource, architecture: Architecture) -> list[Tensor]:
    """Return stacked weights as [experts, columns, rows], and stacked biases unchanged."""
    return [tensor.transpose(1, -1).contiguous() if tensor.dim() > 2 else tensor]


def _stacked_experts_from_hf(joined: Tensor, source: TensorSource, architecture: Architecture) -> Tensor:
    return joined.transpose(1, 2) if joined.dim() > 2 else joined


def _alternating_experts_to_hf(tensor: Tensor, source: TensorSource, architecture: Architecture) -> list[Tensor]:
    """Return a stack in which rows of gate and up projection alternate: gate, up, gate, up."""
    value, gate = tensor.chunk(2, dim=1)
    return _stacked_experts_to_hf(torch.stack((gate, value), dim=2).flatten(1, 2), source, architecture)


def _alternating_experts_from_hf(joined: Tensor, source: TensorSource, architecture: Architecture) -> Tensor:
    gate, value = _stacked_experts_from_hf(joined, source, architecture).unflatten(1, (-1, 2)).unbind(2)
    return torch.cat((value, gate), dim=1)


def _swapped_halves(tensor: Tensor) -> Tensor:
    first, second = tensor.chunk(2)
    return torch.cat([second, first])


def _neighbours_to_halves(rows: int) -> Tensor:
    """Return the order of rows that moves neighbours (2i, 2i + 1) to i and rows / 2 + i: 0 2 4 1 3 5."""
    return torch.arange(rows).reshape(-1, 2).T.flatten()


def _latent_query_order(architecture: Architecture) -> Tensor:
    """Return the order that converts the rows of their query heads to ours: rotary rows first."""
    plain = architecture.head_dim - architecture.rotary_ndims
    return torch.cat([plain + _neighbours_to_halves(architecture.rotary_ndims), torch.arange(plain)])


def _latent_key_order(architecture: Architecture) -> Tensor:
    """Return the order that converts their rows of latent vectors and rotary keys to ours."""
    width = architecture.latent_width
    return torch.cat([torch.arange(width), width + _neighbours_to_halves(architecture.rotary_ndims)])


def _head_rows(architecture: Architecture) -> list[int]:
    """Return the number of rows of all queries, keys and values."""
    queries = architecture.num_attention_heads * architecture.head_dim
    keys = architecture.num_kv_heads * architecture.head_dim
    return [queries, keys, keys]


def _halves_to_neighbours(architecture: Architecture) -> Tensor:
    """Return the order of a head's rows [head_dim] in which rotary pairs (i, i + n/2) of its n rotated rows meet.

    With six rotated rows of eight: 0 3 1 4 2 5 6 7.
    """
    rotated = architecture.rotary_ndims
    pairs = torch.arange(rotated).reshape(2, -1).T.flatten()
    return torch.cat([pairs, torch.arange(rotated, architecture.head_dim)])


def _reorder_heads(rows: Tensor, order: Tensor) -> Tensor:
    """Return rows [heads * head_dim, ...] with the rows of each head in another order [head_dim]."""
    by_head = rows.reshape(-1, len(order), *rows.shape[1:])
    return by_head.index_select(1, order.to(rows.device)).reshape(rows.shape)


ROWS: Mapping[str, RowLayout] = MappingProxyType(
    {
        "same": RowLayout(_equal_parts, _unchanged),
        "heads": RowLayout(_heads_to_hf, _heads_from_hf),
        "grouped_heads": RowLayout(_grouped_heads_to_hf, _grouped_heads_from_hf),
        "gated_heads": RowLayout(_gated_heads_to_hf, _gated_heads_from_hf),
        "delta_heads": RowLayout(_delta_heads_to_hf, _unchanged),
        "grouped_delta_heads": RowLayout(_grouped_delta_heads_to_hf, _grouped_delta_heads_from_hf),
        "experts": RowLayout(_experts_to_hf, _experts_from_hf),
        "stacked_experts": RowLayout(_stacked_experts_to_hf, _stacked_experts_from_hf),
        "alternating_experts": RowLayout(_alternating_experts_to_hf, _alternating_experts_from_hf),
        "latent_queries": RowLayout(
            lambda tensor, source, network: [_reorder_heads(tensor, _latent_query_order(network).argsort())],
            lambda joined, source, network: _reorder_heads(joined, _latent_query_order(network)),
        ),
        "latent_keys": RowLayout(
            lambda tensor, source, network: [_reorder_heads(tensor, _latent_key_order(network).argsort())],
            lambda joined, source, network: _reorder_heads(joined, _latent_key_order(network)),
        ),
        "swapped_halves": RowLayout(
            lambda tensor, source, architecture: [_swapped_halves(tensor)],
            lambda joined, source, architecture: _swapped_halves(joined),
        ),
    }
)
"""`TensorSource.layout` -> its functions."""
