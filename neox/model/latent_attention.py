"""Latent attention: keys and values follow from a short vector of each token (DeepSeek-V2, arXiv:2405.04434).

Legend: B batch, S sequence, H hidden, N heads here, D head dim, R its rotated dims, P = D - R its other dims, V width
of a head's values, C width of the latent vector of keys and values, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Unpack

import torch
from torch import Tensor, nn

from neox.architecture import Architecture
from neox.model.attention import SelfAttention
from neox.model.cache import CacheForm
from neox.model.context import BlockContext
from neox.ops import NORMS, linear
from neox.parallel import (
    ColumnParallelLinear,
    ParallelGrid,
    RowParallelLinear,
    TensorOptions,
    TokenShares,
    copy_to_tensor_ranks,
    copy_tokens_to_tensor_ranks,
)

_EPSILON: Final = 1e-6
"""Epsilon of the norms of latent vectors in DeepSeek's models, whatever that of their other norms."""


class LatentSelfAttention(SelfAttention, TokenShares):
    """Attention whose keys and values are products of one latent vector, and of R rotated numbers for all heads.

        hidden [H] ── query_down, query_norm ── query_up ──── queries N x [R rotated, P]
               └─── key_value_down ─┬─ key_value_norm [C] ── key_value_up ── keys N x P, values N x V
                                    └─ rotated [R] ───────────────────────── keys R, the same in every head

    Without `query_latent_width` queries are one product of the hidden states (`query`). Generation keeps the C + R
    numbers of each token, and multiplies queries and outputs by the weights of `key_value_up` instead of every earlier
    latent vector. Tensor ranks divide heads; each computes the latent vectors whole.
    """

    def _add_projections(
        self, architecture: Architecture, grid: ParallelGrid, **options: Unpack[TensorOptions]
    ) -> None:
        hidden = architecture.hidden_size
        heads = architecture.num_attention_heads
        self.rotated_width = architecture.rotary_ndims
        self.plain_width = self.head_dim - self.rotated_width
        self.value_width = architecture.value_head_dim
        self.latent_width = architecture.latent_width
        norm = NORMS["rmsnorm"]
        width = architecture.query_latent_width
        self.has_query_latents = width > 0
        rows = heads * self.head_dim
        if self.has_query_latents:
            self.query_down = nn.Linear(hidden, width, bias=False, **options)
            self.query_norm = norm(width, eps=_EPSILON, **options)
            self.query_up = ColumnParallelLinear(width, rows, grid, bias=False, multiply=linear, **options)
        else:
            self.query = ColumnParallelLinear(hidden, rows, grid, bias=False, multiply=linear, **options)
        self.key_value_down = nn.Linear(hidden, self.latent_width + self.rotated_width, bias=False, **options)
        self.key_value_norm = norm(self.latent_width, eps=_EPSILON, **options)
        rows = heads * (self.plain_width + self.value_width)
        self.key_value_up = ColumnParallelLinear(self.latent_width, rows, grid, bias=False, multiply=linear, **options)
        self.dense = RowParallelLinear(
            heads * self.value_width,
            hidden,
            grid,
            bias=architecture.attention_output_bias,
            multiply=linear,
            **options,
        )

    def parameters_on_shares(self) -> Iterator[nn.Parameter]:
        """Yield what computes latent vectors."""
        modules = [self.key_value_down, self.key_value_norm]
        if self.has_query_latents:
            modules += [self.query_down, self.query_norm]
        for module in modules:
            yield from module.parameters()

    def _queries_and_latents(
        self, x: Tensor, encode: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, S, N, D], latent vectors [B, S, C] and rotated keys [B, S, 1, R], with their positions.

        With sequence parallelism latent vectors are those of this rank's share of the tokens, [B, S/T, C].
        """
        if self.has_query_latents:
            queries = self.query_up(self.query_norm(linear(x, self.query_down.weight)))
        else:
            queries = self.query(x)
        queries = queries.unflatten(-1, (self.heads_here, self.head_dim))
        down = linear(x, self.key_value_down.weight)
        latents, rotated = down.split((self.latent_width, self.rotated_width), dim=-1)
        latents = self.key_value_norm(latents)
        if self.shares > 1:
            rotated = copy_tokens_to_tensor_ranks(rotated, self.grid)
        else:
            rotated = copy_to_tensor_ranks(rotated, self.grid)
        keys = rotated.unsqueeze(2)
        if encode is not None:
            queries = encode(queries.unsqueeze(3)).squeeze(3)
            keys = encode(keys.unsqueeze(3)).squeeze(3)
        return queries, latents, keys

    def _queries_keys_values(
        self, x: Tensor, encode: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [B, S, N, D] and values [B, S, N, V]."""
        queries, latents, rotated = self._queries_and_latents(x, encode)
        up = self.key_value_up(latents).unflatten(-1, (self.heads_here, -1))
        plain, values = up.split((self.plain_width, self.value_width), dim=-1)
        keys = torch.cat((rotated.expand(-1, -1, self.heads_here, -1), plain), dim=-1)
        return queries, keys, values

    def _attend_with_cache(
        self, x: Tensor, context: BlockContext, encode: Callable[[Tensor], Tensor] | None, bias: Tensor | None
    ) -> Tensor:
        """Attend to the latent vectors themselves: [B, S, H] -> [B, S, N, V]."""
        queries, latents, rotated = self._queries_and_latents(x, encode)
        weight = self.key_value_up.weight.unflatten(0, (self.heads_here, -1))  # [N, P + V, C]
        to_keys, to_values = weight.split((self.plain_width, self.value_width), dim=1)
        turned, plain = queries.split((self.rotated_width, self.plain_width), dim=-1)
        of_latents = torch.einsum("bsnp,npc->bsnc", plain, to_keys)
        queries = torch.cat((of_latents, turned), dim=-1)  # [B, S, N, C + R]
        keys = torch.cat((latents.unsqueeze(2), rotated), dim=-1)  # [B, S, 1, C + R]
        summed = self._cached(queries, keys, None, context, bias)  # [B, S, N, C]
        return torch.einsum("bsnc,nvc->bsnv", summed, to_values)

    @property
    def cache_form(self) -> CacheForm:
        """One vector of all heads for each token: the latent one, which is also the value, and the rotated keys."""
        return CacheForm(None, 1, self.latent_width + self.rotated_width, value_width=self.latent_width)
