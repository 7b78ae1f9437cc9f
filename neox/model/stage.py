"""The forward pass of the layers on one rank: the whole network, or one pipeline stage.

    tokens [B, S] ─ Embedding ─ SoftPrompt ─┬─ Block ─ Block ─ ... ─ Block ─┬─ FinalNorm ─ hidden [B, S, H] ─ head
                                            └──────── BlockContext ─────────┘
                                        made once for all blocks from `Context`

In training, modules of multi-token prediction may go on behind the final norm (`Stage.look_ahead`).

A pipeline stage has one range of these layers, or several: a forward pass of a stage runs one range (`StageRange`). Its
input is then the hidden states of the range before, on another stage (`neox.model.handoff`). In generation each block
also gets its view of the cache; in training, chunks of blocks may be computed again in the backward pass.

Legend: B batch, S sequence, H hidden, V vocabulary, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from neox.architecture import BLOCK_OFFSET, block_losses
from neox.model.attention import SelfAttention
from neox.model.block import Block
from neox.model.cache import BlockState, KVCache
from neox.model.cache_step import CachedLayer, CacheStep
from neox.model.context import Aux, BlockContext, Context, add_aux
from neox.model.embedding import Embedding, Head, LMHead
from neox.model.encoder import MaskedLMHead, SentenceHead, encoder_head
from neox.model.multi_token import MultiTokenLayer
from neox.model.positions import Tables
from neox.model.recomputation import Recomputation
from neox.model.score_head import ScoreHead
from neox.model.soft_prompt import SoftPrompt
from neox.ops import has_fast_path, unpadded_keys
from neox.parallel import ParallelGrid, context_indices, gather_tokens
from neox.plan.ranks.stages import LayerRange
from neox.plan.run_plan import RunPlan


class OutputAhead(NamedTuple):
    """What the modules of multi-token prediction give to an objective.

    Attributes:
        hidden: Hidden states of each depth for the head [B, S, H].
        head: The head, to be used from now on: the modules use the embedding once more, and with ZeRO 3 that releases
            the weight of a tied head which was gathered before.
        aux: Losses that the modules' blocks add to the objective's.
    """

    hidden: list[Tensor]
    head: LMHead
    aux: Aux


class NetworkOutput(NamedTuple):
    """What the network gives to an objective.

    Attributes:
        hidden: Hidden states after the final norm [B, S, H].
        head: The head.
        aux: Losses that blocks add to the objective's.
        look_ahead: Runs the modules of multi-token prediction on `hidden` (`Stage.look_ahead`). An objective that does
            not call it saves the work, as in evaluations.
    """

    hidden: Tensor
    head: LMHead
    aux: Aux
    look_ahead: Callable[[Tensor], OutputAhead] | None = None


class Stage:
    """The layers on this rank. Training, scoring and generation all run them through `forward`.

    They are one range of neighbouring layers, or several if the pipeline schedule says so; then each range runs by
    itself. The modules belong to the caller, who gives them their names; this class only runs them.

    Args:
        plan: Plan of the run.
        grid: Process groups.
        layers: Index in the layer plan -> module. Identity layers may be left out. With a tied head, layer 0 is there
            too, if only as the holder of its weight.
        ranges: The layers that the stage runs, ascending.

    Attributes:
        layers: The modules.
        ranges: The ranges of layers, ascending.
        blocks: The transformer blocks in order.
        head_stage: Number of the pipeline stage that holds the head.
    """

    def __init__(
        self, plan: RunPlan, grid: ParallelGrid, layers: Mapping[int, nn.Module], ranges: Sequence[LayerRange]
    ) -> None:
        self.grid = grid
        self.architecture = plan.architecture
        self.layers = layers
        self.ranges: list[StageRange] = []
        self.blocks: list[Block] = []
        for layer_range in ranges:
            stage_range = StageRange(plan, grid, layers, layer_range, first_block=len(self.blocks))
            self.ranges.append(stage_range)
            self.blocks += stage_range.blocks
        head_index = plan.layers.head.index
        self.head_stage = _holder(plan, head_index)
        self._words = cast(Embedding | None, layers.get(0))
        self._multi_token = self.ranges[-1].multi_token
        self._head = layers.get(head_index)
        self._sentence_head = cast(SentenceHead | None, layers.get(head_index + 1))

    def forward(self, x: Tensor, context: Context, active: int = 0) -> tuple[Tensor, Aux]:
        """Run the layers of one range.

        Args:
            x: Token ids [B, S] if the range begins with the embedding; else the hidden states [B, S, H] of the range
                before. In training with sequence parallelism, each tensor rank has its share of these [B, S/T, H].
            context: What is known of the tokens.
            active: Number of the range on this stage.

        Returns:
            Hidden states for the next range, or for the head after the last one, and the losses of these blocks.
        """
        length = x.shape[1]
        if self.ranges[active].is_first and context.begins:
            length += self.architecture.soft_prompt_tokens
        x, aux = self.ranges[active].forward(x, context)
        if context.cache is not None and active == len(self.ranges) - 1:
            context.cache.advance(length)
        return x, aux

    def output(self, hidden: Tensor, context: Context, aux: Aux) -> NetworkOutput:
        """Return what an objective gets, for hidden states after the final norm [B, S, H] and the losses of blocks."""
        return NetworkOutput(hidden, self.head, aux, partial(self.look_ahead, hidden, context))

    def look_ahead(self, hidden: Tensor, context: Context, tokens: Tensor) -> OutputAhead:
        """Run the modules of multi-token prediction, one after the other (`neox.architecture.multi_token`).

        Args:
            hidden: Hidden states after the final norm [B, S, H].
            context: Context of the pass that computed them.
            tokens: Ids of the tokens 1 to D ahead of each token [B, S, D].
        """
        assert self._words is not None, "the stage of these modules holds the embedding"
        length = hidden.shape[1]
        positions = token_positions(length, hidden.device, context, self.grid)
        of_blocks = self.ranges[-1].block_context(hidden, length, context)
        known = block_losses(self.architecture)
        found = []
        total: Aux = {}
        for depth, module in enumerate(self._multi_token, start=1):
            # Tokens behind the end have no labels, so any position does for them.
            of_tokens = (positions + depth).clamp(max=self.architecture.max_length - 1)
            ahead = self._words(tokens[..., depth - 1], of_tokens)
            hidden, aux = module(hidden, ahead, of_blocks)
            found.append(hidden)
            # Statistics of experts are means over the network's blocks, so those of these blocks are left out.
            total = add_aux(total, {name: value for name, value in aux.items() if name in known})
        return OutputAhead(found, self.head, total)

    @property
    def head(self) -> LMHead:
        """The head, on the stage that holds it. ZeRO 3 gathers its weight where it is read: inside a forward pass."""
        if isinstance(self._head, Head | ScoreHead):
            return self._head.head
        assert self._words is not None, "the stage of a tied head holds its weight"
        if isinstance(self._head, MaskedLMHead):
            return encoder_head(self._words, self._head, self._sentence_head)
        return self._words.head

    def new_cache(self, batch: int, max_length: int, *, device: torch.device, dtype: torch.dtype) -> KVCache:
        """Return an empty cache of this stage's blocks and this rank's heads.

        Args:
            batch: Number of sequences.
            max_length: Most tokens of a sequence.
            device: Device of the cache.
            dtype: Type of hidden states.
        """
        forms = [block.cache_form for block in self.blocks]
        return KVCache(self.architecture, forms, batch, max_length, device=device, dtype=dtype)


class StageRange:
    """One range of neighbouring layers on a stage.

    Args:
        plan: Plan of the run.
        grid: Process groups.
        layers: Index in the layer plan -> module, as `Stage` takes it.
        layer_range: The range.
        first_block: Number of its first block among those of the stage.

    Attributes:
        is_first: Whether the range begins with tokens.
        is_last: Whether the range ends with the hidden states that the head takes.
        previous: Number of the pipeline stage that holds the range before; None before the first range.
        following: Number of the pipeline stage that holds the range after; None after the last range.
        blocks: The transformer blocks in order.
        multi_token: The modules of multi-token prediction that are there, nearest token first; generation has none.
        recomputation: What the backward pass computes again.
        observe_scores: What blocks get as `BlockContext.observe_scores`.
    """

    observe_scores: Callable[[SelfAttention, Tensor, Tensor], None] | None = None

    def __init__(
        self,
        plan: RunPlan,
        grid: ParallelGrid,
        layers: Mapping[int, nn.Module],
        layer_range: LayerRange,
        first_block: int,
    ) -> None:
        self.grid = grid
        self.prompt_length = plan.architecture.soft_prompt_tokens
        self._is_bidirectional = plan.architecture.bidirectional
        self.is_first = layer_range.start == 0
        self.is_last = layer_range.stop == len(plan.layers)
        self.previous: int | None = None
        self.following: int | None = None
        if not self.is_first:
            self.previous = _holder(plan, layer_range.start - 1)
        if not self.is_last:
            self.following = _holder(plan, layer_range.stop)
        self._embedding: Embedding | None = None
        self._prompt: SoftPrompt | None = None
        self._norm: nn.Module | None = None
        self.multi_token: list[MultiTokenLayer] = []
        numbers = []
        for index in layer_range:
            kind = plan.layers[index].kind
            if kind == "embedding":
                self._embedding = cast(Embedding, layers[index])
            elif kind == "prompt":
                self._prompt = cast(SoftPrompt, layers[index])
            elif kind == "block":
                numbers.append(index - BLOCK_OFFSET)
            elif kind == "norm":
                self._norm = layers[index]
            elif kind == "multi_token" and index in layers:
                self.multi_token.append(cast(MultiTokenLayer, layers[index]))
        self.blocks = [cast(Block, layers[BLOCK_OFFSET + number]) for number in numbers]
        self.recomputation = Recomputation.from_plan(plan, grid, numbers)
        self._chunks = self.recomputation.chunks()
        self._cached = slice(first_block, first_block + len(self.blocks))
        self._has_last_block = plan.architecture.num_layers - 1 in numbers
        self._with_tables: dict[str, SelfAttention] = {}  # one block for each kind of tables
        for attention in self._attentions():
            if attention.encoding is not None:
                self._with_tables.setdefault(attention.tables_key, attention)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Aux]:
        """Run the layers, as `Stage.forward` does."""
        if self._embedding is not None:
            x = self._embed(self._embedding, x, context)
        if self._prompt is not None and context.begins:
            x = self._prompt(x, context.first_slots)
        aux: Aux = {}
        if self.blocks:
            x, aux = self._run_blocks(x, context)
        if self._norm is not None:
            if self.prompt_length and context.begins:
                x = x[:, self.prompt_length :]
            x = self._norm(x)
        return x, aux

    def _embed(self, embedding: Embedding, tokens: Tensor, context: Context) -> Tensor:
        positions = None
        if embedding.position_embeddings is not None:
            positions = token_positions(tokens.shape[1], tokens.device, context, self.grid)
            if self.prompt_length and not context.begins:  # the cache holds the prompt, whose vectors do not count
                positions = (positions - self.prompt_length).clamp_(min=0)
        x: Tensor = embedding(tokens, positions, context.token_types)
        return x

    def _run_blocks(self, x: Tensor, context: Context) -> tuple[Tensor, Aux]:
        shares = self.blocks[0].shares
        length = x.shape[1] * shares
        shared = self.block_context(x, length, context)
        if context.cache is not None:
            return _run(self.blocks, x, shared, context.cache.layers(length)[self._cached])
        if self.recomputation.acts_on(self.blocks):
            x, aux = self._run_chunks(x, shared._replace(routes={}))
        else:
            x, aux = _run(self.blocks, x, shared)
        if shares > 1 and self._has_last_block:
            x = gather_tokens(x, self.grid)
        return x, aux

    def _run_chunks(self, x: Tensor, context: BlockContext) -> tuple[Tensor, Aux]:
        """Run blocks in chunks, some of which are recomputed in the backward pass."""
        total: Aux = {}
        for recomputed, chunk in self._chunks:

            def run(x: Tensor, blocks: Sequence[Block] = self.blocks[chunk]) -> tuple[Tensor, Aux]:
                return _run(blocks, x, context)

            if recomputed:
                x, aux = self.recomputation.run(run, x)
            else:
                x, aux = run(x)
            total = add_aux(total, aux)
        return x, total

    def _attentions(self) -> Iterator[SelfAttention]:
        """Yield the attention of the blocks that have one, those of multi-token prediction last."""
        for block in (*self.blocks, *(module.block for module in self.multi_token)):
            if block.attention is not None:
                yield block.attention

    def block_context(self, x: Tensor, length: int, context: Context) -> BlockContext:
        """Return what all blocks share, for `length` tokens with hidden states x."""
        cache = context.cache
        whole_length = length
        if context.divided:
            whole_length *= self.grid.cp_size
        visible = None
        is_text = None
        if context.lengths is not None:
            if self._is_bidirectional:
                assert context.document_starts is None, "one of the two masks would be lost"
                visible = unpadded_keys(context.lengths, length)
            ends = context.lengths.unsqueeze(1) + self.prompt_length
            slots = torch.arange(length, device=x.device)
            if context.divided:
                slots = context_indices(whole_length, self.grid, x.device)
            is_text = slots < ends
        positions = token_positions(length, x.device, context, self.grid)
        keys = whole_length if cache is None else cache.keys(length)
        tables: dict[str, Tables] = {}
        for attention in self._with_tables.values():
            tables |= self._position_tables(attention, positions, keys, x.dtype, context)
        block_masks: dict[str, BlockMask] = {}
        if cache is None and has_fast_path("flex_attention", x.device):
            block_masks = self._block_masks(whole_length, x.device, context)
        return BlockContext(
            positions,
            tables,
            context.document_starts,
            context.divided,
            block_masks,
            visible,
            is_text,
            observes=self.observe_scores is not None,
            observe_scores=self.observe_scores,
        )

    def _position_tables(
        self, attention: SelfAttention, positions: Tensor, keys: int, dtype: torch.dtype, context: Context
    ) -> dict[str, Tables]:
        """Return the tables of a position encoding for new tokens; see `SelfAttention.position_tables`."""
        slots = None
        if isinstance(context.cache, CacheStep):
            slots = context.cache.slot
        elif context.divided and attention.adds_bias and attention.exchanges_heads:
            positions = torch.arange(keys, device=positions.device)  # this rank scores all tokens of some heads
        elif context.divided:
            slots = context_indices(keys, self.grid, positions.device)
        lengths = None
        if attention.encoding is not None and attention.encoding.by_length:
            lengths = sequence_lengths(keys, positions.device, context, self.grid)
        return attention.position_tables(positions, keys, dtype, slots, lengths)

    def _block_masks(self, length: int, device: torch.device, context: Context) -> dict[str, BlockMask]:
        """Return the blocks of pairs for each kind of attention that computes them so, for rows of `length` tokens."""
        masks: dict[str, BlockMask] = {}
        done = set()
        for attention in self._attentions():
            if not attention.takes_block_masks:
                continue
            if attention.pairs_name not in done:
                done.add(attention.pairs_name)
                masks |= attention.block_masks(length, device, context.document_starts, divided=context.divided)
        return masks


def token_positions(length: int, device: torch.device, context: Context, grid: ParallelGrid) -> Tensor:
    """Return the positions of the next `length` tokens: [S], or [B, S] if rows differ. They start anew in documents."""
    if context.cache is not None:
        return context.cache.positions(length)
    if context.divided:
        slots = context_indices(length * grid.cp_size, grid, device)
    else:
        slots = torch.arange(length, device=device)
    if context.document_starts is None:
        return slots
    return slots - context.document_starts[:, slots]


def sequence_lengths(keys: int, device: torch.device, context: Context, grid: ParallelGrid) -> Tensor:
    """Return the length of each new token's sequence: [1], or [B, S] with documents.

    In generation it is the largest number of tokens that the rows may reach, so all keys in the cache are rotated with
    the same frequencies.

    Args:
        keys: Number of keys of a row, over all context ranks.
        device: Device of the tokens.
        context: Context of the forward pass.
        grid: Process groups.
    """
    if context.cache is not None:
        return torch.full((1,), context.cache.longest, device=device)
    starts = context.document_starts
    if starts is None:
        return torch.full((1,), keys, device=device)
    ends = torch.searchsorted(starts, starts, right=True)
    lengths = ends - starts
    if context.divided:
        lengths = lengths[:, context_indices(keys, grid, device)]
    return lengths


def _run(
    blocks: Sequence[Block],
    x: Tensor,
    shared: BlockContext,
    caches: Sequence[CachedLayer | BlockState] | None = None,
) -> tuple[Tensor, Aux]:
    """Run blocks one after another: [B, S, H] -> [B, S, H], and the sum of their losses."""
    total: Aux = {}
    context = shared
    for number, block in enumerate(blocks):
        if caches is not None:
            kept = caches[number]
            if isinstance(kept, BlockState):
                context = shared._replace(state=kept)
            else:
                context = shared._replace(cache=kept)
        x, aux = block(x, context)
        if block.watch is not None:
            block.watch(x)
        if aux:
            total = add_aux(total, aux)
    return x, total


def _holder(plan: RunPlan, layer: int) -> int:
    """Return the number of the pipeline stage that holds a layer."""
    return next(stage.index for stage in plan.stages if stage.holds(layer))
