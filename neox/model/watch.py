"""Observation of blocks in a forward pass: their largest attention logits, and the sizes of their outputs.

Legend: B batch, S sequence, H hidden, N heads of queries, K of keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from neox.model.attention import SelfAttention
from neox.model.block import Block
from neox.model.stage import StageRange
from neox.ops import largest_score


class ForwardWatch:
    """Observes the blocks on this rank between `start` and `stop`, in the first micro batch that runs.

    Later micro batches and recomputed blocks are not observed again.

    Args:
        blocks: Blocks by their index in the layer plan.
        ranges: Ranges of the stage that run them.
        compiled: Whether the blocks are compiled. What observes them then stays outside of the graphs.

    Attributes:
        logits: Largest attention logit of each block with attention, by its index.
        squares: Sum of the squares of each block's output.
        elements: Number of elements of each block's output.
    """

    def __init__(self, blocks: Mapping[int, Block], ranges: Sequence[StageRange], *, compiled: bool) -> None:
        self.logits: dict[int, Tensor] = {}
        self.squares: dict[int, Tensor] = {}
        self.elements: dict[int, int] = {}
        self._blocks = blocks
        self._ranges = ranges
        self._attentions: dict[SelfAttention, int] = {}
        for index, block in blocks.items():
            if block.attention is not None:
                self._attentions[block.attention] = index
        # All blocks get the same function, so that they share a compiled graph.
        self._see_scores = self._observe_scores
        if compiled:
            self._see_scores = torch.compiler.disable(self._observe_scores)

    def start(self) -> None:
        """Observe from now on."""
        self.logits.clear()
        self.squares.clear()
        self.elements.clear()
        for layers in self._ranges:
            layers.observe_scores = self._see_scores
        for index, block in self._blocks.items():
            block.watch = partial(self._observe_output, index)

    def stop(self) -> None:
        """Observe no longer."""
        for layers in self._ranges:
            layers.observe_scores = None
        for block in self._blocks.values():
            block.watch = None

    def _observe_scores(self, attention: SelfAttention, queries: Tensor, keys: Tensor) -> None:
        """Note the largest score of queries [B, S, N, D] and keys [B, S, K, D]."""
        index = self._attentions[attention]
        if index not in self.logits:
            scores = largest_score(queries.detach(), keys.detach(), attention.score_scale, causal=attention.causal)
            self.logits[index] = scores

    def _observe_output(self, index: int, x: Tensor) -> None:
        """Note the size of a block's output [B, S, H]."""
        if index not in self.squares:
            self.squares[index] = torch.linalg.vector_norm(x.detach(), dtype=torch.float32).square()
            self.elements[index] = x.numel()
