"""The whole network on one pipeline stage.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from neox.architecture import BLOCK_OFFSET
from neox.config.plan import RunPlan
from neox.model.block import TransformerLayer, run_blocks
from neox.model.build import build_layer
from neox.model.cache import KVCache
from neox.model.embedding import Embedding, Head, TiedHead
from neox.model.loss import lm_loss
from neox.ops import linear_cross_entropy
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
        self.architecture = plan.architecture
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
        recompute = self.recompute_chunk if self.training and torch.is_grad_enabled() else 0
        x = run_blocks(self.blocks, x, cache, positions, document_starts, recompute)
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
        last = BLOCK_OFFSET + self.architecture.num_layers
        return [cast(TransformerLayer, layer) for layer in self.sequential[BLOCK_OFFSET:last]]

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """Return an empty KV cache of this rank's heads, on the model's device and in its dtype."""
        weight = cast(Embedding, self.sequential[0]).word_embeddings.weight
        num_blocks = self.architecture.num_layers
        return KVCache(
            self.architecture, self.grid, num_blocks, batch, max_length, device=weight.device, dtype=weight.dtype
        )
