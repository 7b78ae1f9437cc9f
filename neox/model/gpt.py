"""The whole network on one pipeline stage.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from neox.architecture import BLOCK_OFFSET
from neox.model.block import Block, run_blocks, token_positions
from neox.model.build import build_layer
from neox.model.cache import KVCache
from neox.model.embedding import Embedding, Head, LMHead
from neox.model.encoder import MaskedLMHead, SentenceHead, encoder_head
from neox.parallel import ParallelGrid
from neox.plan.run_plan import RunPlan


class GPT(nn.Module):
    """GPT-NeoX, or BERT, as layers numbered like the layer plan: parameters are `sequential.N.key`, NeoX's names.

    With `checkpoint_activations` the backward pass recomputes `checkpoint_num_layers` blocks at a time.

    Args:
        plan: Plan of the run.
        grid: Process groups.
        device: Device of the parameters, as `build_layer` takes it.
        dtype: Type of the parameters; fp32 if None.
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
        self.head_index = plan.layers.head.index
        self.recompute_chunk = training.checkpoint_num_layers if training.checkpoint_activations else 0
        self.sequential = nn.ModuleList(
            build_layer(plan, entry.index, grid, device=device, dtype=dtype) for entry in plan.layers
        )

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        document_starts: Tensor | None = None,
        loss: Callable[[Tensor, LMHead], Tensor] | None = None,
        token_types: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Compute logits or a loss.

        Args:
            tokens: Token ids [B, S].
            cache: Tokens seen before; these are appended.
            document_starts: [B, S], where each token's document starts in its row; attention and positions then stay
                within documents. Without a cache only.
            loss: Function of the hidden states [B, S, H] and the head. It is called here because ZeRO 3 gathers the
                head's weight here.
            token_types: Of a bidirectional network, [B, S]; all 0 if None.
            lengths: Of a bidirectional network, tokens of each sample that are no padding, [B]; all if None.

        Returns:
            Logits [B, S, V/tp], or the result of `loss`.
        """
        hidden = self.hidden(tokens, cache, document_starts, token_types, lengths)
        return self.logits(hidden) if loss is None else loss(hidden, self.head)

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        document_starts: Tensor | None = None,
        token_types: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states after the final norm [B, S, H]."""
        count = self.architecture.soft_prompt_tokens
        positions = token_positions(tokens, cache, document_starts, prompt=count)
        x = cast(Embedding, self.sequential[0])(tokens, positions, token_types)
        begins = count > 0 and (cache is None or cache.length == 0)
        if begins:
            x = self.sequential[1](x, None if cache is None else cache.start)
        recompute = self.recompute_chunk if self.training and torch.is_grad_enabled() else 0
        x = run_blocks(self.blocks, x, cache, document_starts, recompute, lengths)
        norm = self.sequential[self.head_index - 1]
        return norm(x[:, count:] if begins else x)

    def logits(self, x: Tensor) -> Tensor:
        """Apply the head: [B, S, H] -> [B, S, V/tp]."""
        return self.head.logits(x)

    @property
    def head(self) -> LMHead:
        """The head for a loss; to be read inside `forward`, where ZeRO 3 gathers the weight."""
        embedding, head = cast(Embedding, self.sequential[0]), self.sequential[self.head_index]
        if isinstance(head, MaskedLMHead):
            last = self.sequential[-1]
            return encoder_head(embedding, head, last if isinstance(last, SentenceHead) else None)
        return embedding.head if self.architecture.tie_word_embeddings else cast(Head, head).head

    @property
    def blocks(self) -> list[Block]:
        """The transformer blocks in order."""
        last = BLOCK_OFFSET + self.architecture.num_layers
        return [cast(Block, layer) for layer in self.sequential[BLOCK_OFFSET:last]]

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """Return an empty KV cache of this rank's heads, on the model's device and in its dtype."""
        weight = cast(Embedding, self.sequential[0]).word_embeddings.weight
        num_blocks = self.architecture.num_layers
        return KVCache(
            self.architecture, self.grid, num_blocks, batch, max_length, device=weight.device, dtype=weight.dtype
        )
