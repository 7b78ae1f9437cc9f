"""The whole network on one pipeline stage.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from neox.config.plan import RunPlan
from neox.model.block import TransformerLayer
from neox.model.build import build_layer
from neox.model.cache import KVCache
from neox.model.ends import Embedding, Head, TiedHead
from neox.model.loss import lm_loss
from neox.ops import linear_cross_entropy, same_document_pairs
from neox.parallel import ParallelGrid


class GPT(nn.Module):
    """GPT-NeoX as a list of layers numbered like the layer plan: parameters are `sequential.N.key`, NeoX's names.

    checkpoint_activations recomputes `checkpoint_num_layers` blocks at a time in the backward pass.
    """

    def __init__(
        self,
        plan: RunPlan,
        grid: ParallelGrid,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.num_layers = plan.layers.num_layers
        self.heads_here = plan.layers.num_attention_heads // grid.tp_size
        self.head_dim = plan.layers.hidden_size // plan.layers.num_attention_heads
        training = plan.config.training
        self.recompute_chunk = training.checkpoint_num_layers if training.checkpoint_activations else 0
        self.sequential = nn.ModuleList(
            build_layer(plan, entry.index, grid, device=device, dtype=dtype) for entry in plan.layers
        )

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        targets: tuple[Tensor, Tensor] | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Return logits: tokens [B, S] -> [B, S, V/tp]; or, given targets, their `loss`, a scalar.

        cache: tokens seen before; these are appended. positions: [S] or [B, S]; from the cache, or 0..S-1, if None.
        targets: (labels, loss_mask), [B, S] each. document_starts: [B, S], where each token's document starts in its
        row; attention and positions then stay within documents (without a cache).
        """
        if targets is not None:
            return self.loss(tokens, targets, document_starts)
        return self.logits(self.hidden(tokens, cache, positions, document_starts))

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states after the final norm [B, S, H]."""
        x = cast(Embedding, self.sequential[0])(tokens)
        same_document = None
        if document_starts is not None:
            assert cache is None, "documents are kept apart in training and scoring alone"
            positions = torch.arange(tokens.shape[1], device=tokens.device) - document_starts
            same_document = same_document_pairs(document_starts)
        if cache is not None:
            positions = cache.positions(tokens.shape[1]) if positions is None else positions
            for block, part in zip(self.blocks, cache.layers(tokens.shape[1]), strict=True):
                x = block(x, positions, part)
            cache.advance(tokens.shape[1])
        elif self.recompute_chunk and self.training and torch.is_grad_enabled():
            x = self._recomputed_blocks(x, positions, same_document)
        else:
            for block in self.blocks:
                x = block(x, positions, None, same_document)
        return self.sequential[-2](x)

    def logits(self, x: Tensor) -> Tensor:
        """Apply the head: [B, S, H] -> [B, S, V/tp]."""
        head = self.sequential[-1]
        if isinstance(head, TiedHead):
            return head(x, cast(Embedding, self.sequential[0]).word_embeddings.weight)
        return head(x)

    def loss(self, tokens: Tensor, targets: tuple[Tensor, Tensor], document_starts: Tensor | None = None) -> Tensor:
        """Return what `lm_loss` makes of the logits: tokens [B, S], (labels, loss_mask) [B, S] each -> scalar, fp32.

        On one tensor rank the logits are never held whole, which saves B x S x V numbers several times over.
        """
        head = self.sequential[-1]
        x = self.hidden(tokens, document_starts=document_starts)
        if self.grid.tp_size > 1:
            return lm_loss(self.logits(x), targets, self.grid)
        tied = isinstance(head, TiedHead)
        weight = cast(Embedding, self.sequential[0]).word_embeddings.weight if tied else cast(Head, head).weight
        labels, mask = (target.reshape(-1) for target in targets)
        mask = mask.float()
        return linear_cross_entropy(x.flatten(0, 1), weight, labels, mask / mask.sum().clamp(min=1.0))

    @property
    def blocks(self) -> list[TransformerLayer]:
        """The transformer blocks in order."""
        return [cast(TransformerLayer, layer) for layer in self.sequential[2 : 2 + self.num_layers]]

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """Return an empty KV cache of this rank's heads, on the model's device and in its dtype."""
        weight = cast(Embedding, self.sequential[0]).word_embeddings.weight
        return KVCache(
            self.num_layers, batch, max_length, self.heads_here, self.head_dim, device=weight.device, dtype=weight.dtype
        )

    def _recomputed_blocks(self, x: Tensor, positions: Tensor | None, same_document: Tensor | None) -> Tensor:
        blocks = self.blocks
        for first in range(0, len(blocks), self.recompute_chunk):
            chunk = blocks[first : first + self.recompute_chunk]

            def run(x: Tensor, chunk: list[TransformerLayer] = chunk) -> Tensor:
                for block in chunk:
                    x = block(x, positions, None, same_document)
                return x

            x = self.grid.rng.checkpoint(run, x)
        return x
