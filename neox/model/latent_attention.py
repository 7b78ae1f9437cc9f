"""Multi-head latent attention (MLA): keys and values are computed from one short latent vector per token.

Source: DeepSeek-V2, arXiv:2405.04434.

Legend: B batch, S sequence, H hidden, N heads here, D head dim, R rotary dims of a head, P = D - R its other dims,
V value head dim, C width of the latent vector, T tensor ranks.
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
    WholeLinear,
    copy_to_tensor_ranks,
    copy_tokens_to_tensor_ranks,
)

_EPSILON: Final = 1e-6
"""Epsilon of the norms of latent vectors in DeepSeek's models; it does not depend on `rms_norm_eps`."""


class LatentSelfAttention(SelfAttention, TokenShares):
    """Attention whose keys and values come from one latent vector per token, and from a rotary key that heads share.

        hidden [H] ── query_down, query_norm ── query_up ──── queries N x [R rotated, P]
               └─── key_value_down ─┬─ key_value_norm [C] ── key_value_up ── keys N x P, values N x V
                                    └─ rotated [R] ───────────────────────── keys R, the same in every head

    If `query_latent_width` is 0, queries are a single projection of the hidden states (`query`). In generation the
    cache holds C + R numbers per token, and `key_value_up` is absorbed into the queries and outputs, so cached latent
    vectors are never expanded. Heads are split over tensor ranks; each rank computes the latent vectors in full.
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
            self.query_down = WholeLinear(hidden, width, grid, multiply=linear, **options)
            self.query_norm = norm(width, eps=_EPSILON, **options)
            self.query_up = ColumnParallelLinear(width, rows, grid, bias=False, multiply=linear, **options)
        else:
            self.query = ColumnParallelLinear(hidden, rows, grid, bias=False, multiply=linear, **options)
        rows_down = self.latent_width + self.rotated_width
        self.key_value_down = WholeLinear(hidden, rows_down, grid, multiply=linear, **options)
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
        """Yield the parameters of the norms of latent vectors; the layers before them yield their own."""
        yield from self.key_value_norm.parameters()
        if self.has_query_latents:
            yield from self.query_norm.parameters()

    def _queries_and_latents(
        self, x: Tensor, encode: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, S, N, D], latent vectors [B, S, C] and rotary keys [B, S, 1, R], with positions applied.

        With sequence parallelism the latent vectors are those of this rank's share of the tokens, [B, S/T, C].
        """
        if self.has_query_latents:
            queries = self.query_up(self.query_norm(self.query_down(x)))
        else:
            queries = self.query(x)
        queries = queries.unflatten(-1, (self.heads_here, self.head_dim))
        down = self.key_value_down(x)
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
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return queries and keys [B, S, N, D] and values [B, S, N, V]; there is no gate."""
        queries, latents, rotated = self._queries_and_latents(x, encode)
        up = self.key_value_up(latents).unflatten(-1, (self.heads_here, -1))
        plain, values = up.split((self.plain_width, self.value_width), dim=-1)
        keys = torch.cat((rotated.expand(-1, -1, self.heads_here, -1), plain), dim=-1)
        return queries, keys, values, None

    def _attend_with_cache(
        self, x: Tensor, context: BlockContext, encode: Callable[[Tensor], Tensor] | None, bias: Tensor | None
    ) -> Tensor:
        """Attend to the cached latent vectors with `key_value_up` absorbed: [B, S, H] -> [B, S, N*V]."""
        queries, latents, rotated = self._queries_and_latents(x, encode)
        weight = self.key_value_up.adapted_weight.unflatten(0, (self.heads_here, -1))  # [N, P + V, C]
        to_keys, to_values = weight.split((self.plain_width, self.value_width), dim=1)
        rotated_queries, plain = queries.split((self.rotated_width, self.plain_width), dim=-1)
        latent_queries = torch.einsum("bsnp,npc->bsnc", plain, to_keys)
        queries = torch.cat((latent_queries, rotated_queries), dim=-1)  # [B, S, N, C + R]
        keys = torch.cat((latents.unsqueeze(2), rotated), dim=-1)  # [B, S, 1, C + R]
        outputs = self._cached(queries, keys, None, context, bias)  # [B, S, N, C]
        return torch.einsum("bsnc,nvc->bsnv", outputs, to_values).flatten(2)

    @property
    def cache_form(self) -> CacheForm:
        """One vector per token for all heads: the latent vector, which is also the value, and the rotary key."""
        return CacheForm(None, 1, self.latent_width + self.rotated_width, value_width=self.latent_width)
