"""Self-attention of one block, by name of the attention kind.

Legend: B batch, S sequence, L keys, H hidden, D head dim; N heads of queries and K heads of keys and values on this
rank; T tensor ranks; C blocks of tokens in a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from neox.architecture import BLOCKS, FLEX_HEAD_DIM, Architecture, settings_of
from neox.architecture import POSITIONS as POSITION_TRAITS
from neox.config.sections.training import RecomputedPart
from neox.devices import AttentionBackend
from neox.model.cache import CacheForm
from neox.model.context import BlockContext
from neox.model.head_norms import query_key_norms
from neox.model.positions import POSITIONS, PositionEncoding, Tables
from neox.ops import (
    AttentionImpl,
    PairRule,
    VisiblePairs,
    block_layout,
    block_mask_of,
    core_attention,
    linear,
    rule_of_heads,
    sparse_rule,
    window_rule,
)
from neox.parallel import (
    ColumnParallelLinear,
    ParallelGrid,
    RowParallelLinear,
    Summand,
    TensorOptions,
    context_ranges,
    gathered_context,
    heads_to_tokens,
    mark_split,
    tokens_to_heads,
)

# Names of the tables of positions.
_GLOBAL = "global"  # of all blocks
_LOCAL = "local"  # of blocks with a window and a rotary base of their own


class SelfAttention(nn.Module):
    """Multi-head attention with heads split over tensor ranks; causal unless the network is bidirectional.

        x [B, S, H] ─ query_key_value ─ norms of q and k ─ positions ─ q [B, S, N, D], k and v [B, S, K, D]
                                                                         │
            training and scoring    _core: pairs that see each other, then a kernel. Context ranks first
                                    exchange tokens for heads, or gather all keys and values.
            generation              _cached: write k and v to their slots, attend to all slots
                                                                         │
        [B, S, H] ─ dense, reduced over tensor ranks ─────── outputs of heads [B, S, N * D], gated

    `recompute` may repeat the upper two thirds (`full_attn`) or `_core` (`core_attn`) in the backward pass.

    Rows of the fused projection: [heads, 3, D] with as many heads of keys and values as of queries, as in NeoX;
    otherwise this rank's queries, then its keys, then its values. With a gate of the output, the gates [N, D] follow.

    Args:
        architecture: The network.
        number: Number of the block, from 0.
        grid: Process groups; the numbers of heads must be multiples of the tensor-parallel degree.
        impl: Kernel.
        dropout: Probability of dropping an attention weight in training.
        layer_scaling: NeoX's query-key layer scaling: the product of queries and keys is divided by the block's
            number, counted from 1, and the softmax multiplies by it again. So scores in fp16 do not overflow.
        **options: Device and type of the parameters.

    Attributes:
        recompute: What the backward pass computes again. `full_attn`: everything before the output projection.
            `core_attn`: what follows the projection to queries, keys and values.
        backend: Kernel of the `flash` path, which the engine sets for training.
        score_scale: Factor of the attention scores, 1 / sqrt(D) unless the network says otherwise.
        softcap: Bound of the attention scores; 0 for none.
        gates_output: Whether the outputs of heads are multiplied by a sigmoid before the output projection.
        sinks: Scores [N] that take part in the softmax and add nothing; None for none.
        tables_key: Which of the tables of positions in `BlockContext.tables` the block reads.
        softmax_scale: Factor that is divided out of the scores before the softmax, and multiplied back inside it: the
            block's number with layer scaling, otherwise 1.
        reach: Number of tokens that a window covers, the query's own included; None for all.
        pair_heads: Number of heads that see different pairs; 1 if all see the same ones.

    Raises:
        ValueError: The heads cannot be divided.
    """

    recompute: RecomputedPart = "none"
    backend: AttentionBackend = "auto"
    reach: int | None = None
    pair_heads = 1

    def __init__(
        self,
        architecture: Architecture,
        number: int,
        grid: ParallelGrid,
        *,
        impl: AttentionImpl,
        dropout: float = 0.0,
        layer_scaling: bool = False,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        kind = BLOCKS[architecture.attention[number]].attention
        has_window = kind is not None and kind.sees == "window"
        is_local = has_window and bool(architecture.local_rotary_base)
        heads = architecture.num_attention_heads
        kv_heads = architecture.num_kv_heads
        if heads % kv_heads or kv_heads % grid.tp_size:
            raise ValueError(
                f"num_attention_heads {heads} must be a multiple of num_kv_heads {kv_heads}, and that of the "
                f"tensor-parallel degree {grid.tp_size}"
            )
        self.grid = grid
        self.impl: AttentionImpl = impl
        self.causal = not architecture.bidirectional
        self.heads_here = heads // grid.tp_size
        self.kv_heads_here = kv_heads // grid.tp_size
        self.attended_heads = architecture.attended_heads // grid.tp_size
        self.head_dim = architecture.head_dim
        self.value_width = self.head_dim
        self.dropout = dropout
        self.score_scale = architecture.attention_scale or 1.0 / math.sqrt(self.head_dim)
        self.softmax_scale = 1.0
        if layer_scaling:
            self.softmax_scale = float(number + 1)

        self._add_projections(architecture, grid, **options)
        self.softcap = architecture.attention_softcap
        self.sinks: nn.Parameter | None = None
        if architecture.attention_sinks:
            self.sinks = mark_split(nn.Parameter(torch.empty(self.heads_here, **options)), grid.tp_size > 1)
        self.adds_bias = POSITION_TRAITS[architecture.positions].biases_scores
        self._encoding_name: str | None = None
        self.tables_key = _LOCAL if is_local else _GLOBAL
        build_encoding = POSITIONS[architecture.positions].attention
        if build_encoding is not None and number not in architecture.unrotated_blocks:
            described = architecture
            if is_local:
                described = replace(architecture, rotary_base=architecture.local_rotary_base, rope_scaling=())
            encoding = build_encoding(described, grid, **options)
            self._encoding_name = encoding.name
            self.add_module(encoding.name, encoding)

    def _add_projections(
        self, architecture: Architecture, grid: ParallelGrid, **options: Unpack[TensorOptions]
    ) -> None:
        """Add the projections of queries, keys, values and output, and the norms of queries and keys."""
        hidden = architecture.hidden_size
        heads = architecture.num_attention_heads
        rows = (heads + 2 * architecture.num_kv_heads) * self.head_dim
        if architecture.attention_output_gate:
            rows += heads * self.head_dim
        self.query_key_value = ColumnParallelLinear(
            hidden, rows, grid, bias=architecture.qkv_bias, multiply=linear, **options
        )
        self.gates_output = architecture.attention_output_gate
        norms = query_key_norms(architecture, grid, **options)
        self._norm_names = tuple(norms)
        for name, norm in norms.items():
            self.add_module(name, norm)
        self.dense = RowParallelLinear(
            heads * self.head_dim, hidden, grid, bias=architecture.attention_output_bias, multiply=linear, **options
        )

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """Attend: hidden states [B, S, H] -> [B, S, H]; with sequence parallelism, shares of them [B, S/T, H]."""
        return self.dense(self._head_outputs(x, context))

    def summand(self, x: Tensor, context: BlockContext) -> Summand:
        """Return this rank's part of the output, before the reduction over tensor ranks."""
        return self.dense.summand(self._head_outputs(x, context))

    def _head_outputs(self, x: Tensor, context: BlockContext) -> Tensor:
        """Return the outputs of this rank's heads, before the output projection: [B, S, H] -> [B, S, N*D]."""
        return self._maybe_recomputed("full_attn", self._attend, x, context)

    def _attend(self, x: Tensor, context: BlockContext) -> Tensor:
        encode = None
        bias = None
        encoding = self.encoding
        if encoding is not None:
            tables = context.tables[self.tables_key]
            encode = partial(encoding, tables=tables)
            bias = encoding.score_bias(tables)
        if context.cache is not None:
            return self._attend_with_cache(x, context, encode, bias)
        q, k, v, gate = self._queries_keys_values(x, encode)
        if context.observes:
            assert context.observe_scores is not None
            context.observe_scores(self, q, k)
        if self.impl == "flash" and bias is None:  # this kernel stores no scores, so recomputing it would save nothing
            out = self._core(q, k, v, context, bias)
        else:
            out = self._maybe_recomputed("core_attn", self._core, q, k, v, context, bias)
        return _gated(out.flatten(2), gate)

    def _attend_with_cache(
        self, x: Tensor, context: BlockContext, encode: Callable[[Tensor], Tensor] | None, bias: Tensor | None
    ) -> Tensor:
        """Add the new tokens to the cache, and attend to all tokens in it: [B, S, H] -> [B, S, N*D]."""
        q, k, v, gate = self._queries_keys_values(x, encode)
        return _gated(self._cached(q, k, v, context, bias).flatten(2), gate)

    def _cached(self, q: Tensor, k: Tensor, v: Tensor | None, context: BlockContext, bias: Tensor | None) -> Tensor:
        """Attend to cached and new tokens: q [B, S, N, D], k and v [B, S, K, D] -> [B, S, N, D].

        If v is None, the values are the leading dimensions of the keys (`CacheForm.value_width`).
        """
        cache = context.cache
        assert cache is not None
        pairs = None
        if cache.positions is not None:
            pairs = self._cache_mask(context.positions, cache.positions)
        return cache.attend(q, k, v, self.score_scale, pairs, bias, softcap=self.softcap, sinks=self.sinks)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, context: BlockContext, bias: Tensor | None) -> Tensor:
        """Attend: q [B, S, N, D], k and v [B, S, K, D] -> [B, S, N, D]; with context ranks, this rank's tokens."""
        length = q.shape[1]
        if context.divided:
            length *= self.grid.cp_size
        pairs = self.visible_pairs(length, q.device, context.document_starts, divided=context.divided)
        if not context.divided:
            mask = context.block_masks.get(self.pairs_name)
            return self._kernel(q, k, v, pairs, bias, self.sinks, block_mask=mask, visible=context.visible)
        if self.exchanges_heads:
            return self._core_of_heads(q, k, v, pairs, context, bias)
        assert pairs is not None
        return self._core_of_parts(q, k, v, pairs, context, bias)

    def _core_of_heads(
        self, q: Tensor, k: Tensor, v: Tensor, pairs: VisiblePairs | None, context: BlockContext, bias: Tensor | None
    ) -> Tensor:
        """Attend with all tokens of some heads, for which context ranks exchange all heads of their tokens."""
        ranks = self.grid.cp_size
        q, k, v = (tokens_to_heads(x, self.grid) for x in (q, k, v))
        if bias is not None:
            bias = bias.chunk(ranks, dim=1)[self.grid.cp_rank]
        sinks = None
        if self.sinks is not None:
            sinks = self.sinks.chunk(ranks)[self.grid.cp_rank]
        mask = context.block_masks.get(self.pairs_name)
        out = self._kernel(q, k, v, pairs, bias, sinks, block_mask=mask)
        return heads_to_tokens(out, self.grid)

    def _core_of_parts(
        self, q: Tensor, k: Tensor, v: Tensor, pairs: VisiblePairs, context: BlockContext, bias: Tensor | None
    ) -> Tensor:
        """Attend from the queries of this rank's two ranges of tokens to the keys of all context ranks."""
        parts = context_ranges(pairs.length, self.grid)
        mask = context.block_masks.get(self.pairs_name)
        with gathered_context(k, v, self.grid) as (all_k, all_v):
            return self._kernel(q, all_k, all_v, pairs, bias, self.sinks, block_mask=mask, queries=parts)

    def _kernel(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pairs: VisiblePairs | None,
        bias: Tensor | None,
        sinks: Tensor | None,
        *,
        block_mask: BlockMask | None = None,
        visible: Tensor | None = None,
        queries: Sequence[range] | None = None,
    ) -> Tensor:
        """Call the kernel with this block's scales and dropout."""
        dropout_p = 0.0
        dropout_context = None
        if self.training and self.dropout > 0.0:
            dropout_p = self.dropout
            if self.grid.rng.enabled:  # each tensor rank drops weights of its own heads
                dropout_context = self.grid.rng.fork(q.device)
        return core_attention(
            q,
            k,
            v,
            impl=self.impl,
            backend=self.backend,
            scale=self.score_scale / self.softmax_scale,
            softmax_scale=self.softmax_scale,
            dropout_p=dropout_p,
            dropout_context=dropout_context,
            causal=self.causal,
            pairs=pairs,
            queries=queries,
            block_mask=block_mask,
            mask=visible,
            bias=bias,
            softcap=self.softcap,
            sinks=sinks,
        )

    def _maybe_recomputed(self, part: RecomputedPart, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call a function. In training, if `recompute` names this part, its activations are recomputed, not kept."""
        if self.recompute == part and self.training and torch.is_grad_enabled():
            return cast(Tensor, self.grid.rng.checkpoint(function, *args))
        return function(*args)

    def _queries_keys_values(
        self, x: Tensor, encode: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries [B, S, N, D], keys and values [B, S, K, D], and the logits of the output's gate [B, S, N*D].

        Queries and keys are normalised and have their positions. Without a gate its logits are None.

        Args:
            x: Hidden states [B, S, H].
            encode: Puts positions into queries and keys [B, S, heads, 1 or 2, D]; None leaves them as they are.
        """
        projected = self.query_key_value(x)
        if not self.gates_output:
            return *self._heads(projected, encode), None
        rows = (self.heads_here + 2 * self.kv_heads_here) * self.head_dim
        qkv, gate = projected.split((rows, self.heads_here * self.head_dim), dim=-1)
        return *self._heads(qkv, encode), gate

    def _heads(self, qkv: Tensor, encode: Callable[[Tensor], Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, S, N, D], keys and values [B, S, K, D] of the fused projection."""
        if self._norm_names:
            queries, keys, values = self._normalised(*self._split(qkv))
            if encode is not None:
                queries = encode(queries.unsqueeze(3)).squeeze(3)
                keys = encode(keys.unsqueeze(3)).squeeze(3)
            return queries, keys, values
        if encode is None:
            return self._split(qkv)
        # Without norms, one call encodes queries and keys together.
        heads = self.heads_here
        kv_heads = self.kv_heads_here
        if heads == kv_heads:
            queries_and_keys, values = qkv.unflatten(-1, (heads, 3, self.head_dim)).split((2, 1), dim=3)
            queries, keys = encode(queries_and_keys).unbind(3)  # from [B, S, N, 2, D]
            return queries, keys, values.squeeze(3)
        rows = qkv.unflatten(-1, (heads + 2 * kv_heads, self.head_dim))
        queries_and_keys, values = rows.split((heads + kv_heads, kv_heads), dim=2)
        encoded = encode(queries_and_keys.unsqueeze(3)).squeeze(3)  # [B, S, N + K, D]
        queries, keys = encoded.split((heads, kv_heads), dim=2)
        return queries, keys, values

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the fused projection into queries [B, S, N, D], keys and values [B, S, K, D]."""
        heads = self.heads_here
        kv_heads = self.kv_heads_here
        if heads == kv_heads:
            queries, keys, values = qkv.unflatten(-1, (heads, 3, self.head_dim)).unbind(3)
        else:
            rows = qkv.unflatten(-1, (heads + 2 * kv_heads, self.head_dim))
            queries, keys, values = rows.split((heads, kv_heads, kv_heads), dim=2)
        return queries, keys, values

    def _normalised(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the norms of queries and keys.

        gpt-neox has one norm for both, with a row of parameters for each query head. With it, keys and values are first
        repeated, once for each query head (`Architecture.attended_heads`).
        """
        if self.attended_heads != self.kv_heads_here:
            copies = self.heads_here // self.kv_heads_here
            keys = keys.repeat_interleave(copies, dim=2)
            values = values.repeat_interleave(copies, dim=2)
        query_norm = self.get_submodule(self._norm_names[0])
        key_norm = self.get_submodule(self._norm_names[-1])
        return query_norm(queries), key_norm(keys), values

    def pairs(self, length: int) -> PairRule | None:
        """Return which queries may see which keys in this kind of attention, in rows of at most `length` tokens.

        It is the only description: dense masks and masks by block follow from it. None stands for all earlier keys.
        """
        return None

    def visible_pairs(
        self, length: int, device: torch.device, document_starts: Tensor | None = None, *, divided: bool = False
    ) -> VisiblePairs | None:
        """Return which queries see which keys in whole rows of tokens; None if each sees all earlier ones.

        Args:
            length: Number of tokens in a row, S.
            device: Device of the tokens.
            document_starts: Index in the row at which each token's document starts, [B, S].
            divided: Whether context ranks divide the tokens. Then the heads are those that this rank computes, and
                the result is never None on a rank that computes only some queries.
        """
        rule = self.pairs(length)
        computes_all_queries = not divided or self.exchanges_heads
        if rule is None and document_starts is None and computes_all_queries and self.backend != "flex":
            return None
        heads = self.pair_heads
        if rule is not None and heads > 1 and divided and self.exchanges_heads:
            heads //= self.grid.cp_size
            rule = rule_of_heads(rule, first=heads * self.grid.cp_rank)
        return VisiblePairs(length, device, document_starts, rule, self.reach, heads)

    @property
    def exchanges_heads(self) -> bool:
        """Whether context ranks exchange tokens for heads; otherwise each gets all keys and values."""
        return self.grid.topology.cp_kind == "ulysses"

    @property
    def pairs_name(self) -> str:
        """Name that blocks share if the same pairs see each other in them."""
        return "all"

    def block_masks(
        self, length: int, device: torch.device, document_starts: Tensor | None, *, divided: bool
    ) -> dict[str, BlockMask]:
        """Return the pairs by block for the kernel of GPUs, by the names by which the forward pass asks for them.

        Arguments are those of `visible_pairs`.
        """
        pairs = self.visible_pairs(length, device, document_starts, divided=divided)
        if pairs is None:
            return {}
        if not divided or self.exchanges_heads:
            return {self.pairs_name: block_mask_of(pairs)}
        return {self.pairs_name: block_mask_of(pairs, context_ranges(length, self.grid))}

    @property
    def cache_form(self) -> CacheForm:
        """What generation caches, and for how many tokens: with a sliding window only those in the window.

        A window is not used if scores have a bias, a bound or sinks.
        """
        tokens = self.reach
        if self.adds_bias or self.softcap or self.sinks is not None:
            tokens = None
        return CacheForm(tokens, self.attended_heads, self.head_dim)

    @property
    def takes_block_masks(self) -> bool:
        """Whether the flash path computes these pairs by block now.

        FlexAttention's kernel of GPUs has neither dropout nor a bias of scores, and no narrow heads.
        """
        drops = self.training and self.dropout > 0.0
        wide_enough = min(self.head_dim, self.value_width) >= FLEX_HEAD_DIM
        takes_them = self.impl == "flash" and self.backend in ("auto", "flex")
        return takes_them and not drops and not self.adds_bias and wide_enough

    def _cache_mask(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Return which queries, at positions [S] or [B, S], see which keys, at [L] or [B, L].

        Returns:
            Bool [B or 1, N or 1, S, L], causal; None if each query sees all earlier keys.
        """
        rule = self.pairs(keys.shape[-1])
        if rule is None:
            return None
        heads = torch.arange(self.pair_heads, device=queries.device).view(-1, 1, 1)
        rows_of_queries = torch.atleast_2d(queries)[:, None, :, None]
        rows_of_keys = torch.atleast_2d(keys)[:, None, None, :]
        return rule(rows_of_queries, rows_of_keys, heads)

    @property
    def encoding(self) -> PositionEncoding | None:
        """The position encoding that acts in attention, if the network has one."""
        if self._encoding_name is None:
            return None
        return cast(PositionEncoding, getattr(self, self._encoding_name))

    def position_tables(
        self,
        positions: Tensor,
        keys: int,
        dtype: torch.dtype,
        slots: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> dict[str, Tables]:
        """Return the tables that the block needs of the new tokens, by their key; nothing without an encoding.

        Blocks with the same `tables_key` need the same tables. Arguments are those of `PositionEncoding.tables`.
        """
        if self.encoding is None:
            return {}
        return {self.tables_key: self.encoding.tables(positions, keys, dtype, slots, lengths)}


def _gated(out: Tensor, gate: Tensor | None) -> Tensor:
    """Multiply the outputs of heads [B, S, N*D] by the sigmoid of the gate's logits, if there are some."""
    return out if gate is None else out * gate.sigmoid()


class SparseSelfAttention(SelfAttention):
    """Self-attention to the keys that a pattern of blocks allows (`neox.architecture.sparsity`).

    Attributes:
        layout: Which blocks of tokens see each other in the longest sequence, bool [N or 1, C, C]. Checkpoints leave it
            out, because it follows from the architecture.
    """

    layout: Tensor

    def __init__(self, architecture: Architecture, number: int, grid: ParallelGrid, **arguments: Any) -> None:
        assert not architecture.bidirectional, "patterns of blocks are causal"
        super().__init__(architecture, number, grid, **arguments)
        self.number = number
        self.kind = architecture.attention[number]
        self.settings = settings_of(self.kind, architecture.sparsity)
        self.block: int = self.settings["block"]
        self.longest_blocks = -(-architecture.max_positions // self.block)
        layout = self._layout_of(self.longest_blocks).to(arguments.get("device"))
        self.register_buffer("layout", layout, persistent=False)
        self.pair_heads = layout.shape[0]

    def reset(self) -> None:
        """Fill the buffer again, after a module from the meta device got memory."""
        self.layout.copy_(self._layout_of(self.longest_blocks))

    def pairs(self, length: int) -> PairRule:
        """Return the rule that allows pairs whose blocks see each other."""
        layout = self.layout
        blocks = -(-length // self.block)
        if blocks > self.longest_blocks:  # rows with padding may be longer than the network is meant for
            layout = self._layout_of(blocks).to(layout.device)
        return sparse_rule(layout, self.block)

    @property
    def pairs_name(self) -> str:
        """The kind and the block's number, because patterns may be drawn for each block."""
        return f"{self.kind} of block {self.number}"

    def _layout_of(self, blocks: int) -> Tensor:
        first = self.grid.tp_rank * self.heads_here
        heads = range(first, first + self.heads_here)
        return block_layout(self.kind, self.settings, blocks=blocks, heads=heads, layer=self.number)


class WindowedSelfAttention(SelfAttention):
    """Self-attention to the last `window` tokens, including the query's own."""

    def __init__(self, architecture: Architecture, number: int, grid: ParallelGrid, **arguments: Any) -> None:
        assert not architecture.bidirectional, "a window is causal"
        super().__init__(architecture, number, grid, **arguments)
        self.reach = architecture.window

    def pairs(self, length: int) -> PairRule:
        """Return the rule that allows pairs at most `reach` - 1 positions apart."""
        assert self.reach is not None
        return window_rule(self.reach)

    @property
    def pairs_name(self) -> str:
        """The window."""
        return f"window of {self.reach}"
