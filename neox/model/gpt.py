"""The whole network on one pipeline stage.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from neox.model.block import Block
from neox.model.build import build_layer
from neox.model.cache import KVCache
from neox.model.context import Context
from neox.model.embedding import LMHead
from neox.model.stage import NetworkOutput, Stage
from neox.parallel import ParallelGrid
from neox.plan.ranks.stages import LayerRange
from neox.plan.run_plan import RunPlan


class GPT(nn.Module):
    """GPT-NeoX, or BERT, as layers numbered like the layer plan: parameters are `sequential.N.key`, NeoX's names.

    Args:
        plan: Plan of the run.
        grid: Process groups.
        device: Device of the parameters, as `build_layer` takes it.
        dtype: Type of the parameters; fp32 if None.
        build: Builds a layer of the layer plan, given its index; `build_layer` if None.

    Attributes:
        stage: All layers, as one stage.
    """

    def __init__(
        self,
        plan: RunPlan,
        grid: ParallelGrid,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        build: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        if build is None:
            build = partial(build_layer, plan, grid=grid, device=device, dtype=dtype)
        self.grid = grid
        self.architecture = plan.architecture
        self.sequential = nn.ModuleList(build(entry.index) for entry in plan.layers)
        layers = dict(enumerate(self.sequential))
        self.stage = Stage(plan, grid, layers, [LayerRange(0, len(plan.layers))])

    def forward(
        self,
        tokens: Tensor,
        context: Context | None = None,
        loss: Callable[[NetworkOutput], Tensor] | None = None,
    ) -> Tensor:
        """Compute logits or a loss.

        Args:
            tokens: Token ids [B, S].
            context: What is known of the tokens.
            loss: Function of the network's output. It is called here because ZeRO 3 gathers the head's weight here.

        Returns:
            Logits [B, S, V/tp], or the result of `loss`.
        """
        context = context or Context()
        hidden, aux = self.stage.forward(tokens, context)
        if loss is None:
            return self.stage.head.logits(hidden)
        return loss(self.stage.output(hidden, context, aux))

    def hidden(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """Return the hidden states after the final norm [B, S, H] for tokens [B, S]."""
        hidden, _ = self.stage.forward(tokens, context or Context())
        return hidden

    def logits(self, x: Tensor) -> Tensor:
        """Apply the head: [B, S, H] -> [B, S, V/tp]."""
        return self.stage.head.logits(x)

    @property
    def head(self) -> LMHead:
        """The head for a loss."""
        return self.stage.head

    @property
    def blocks(self) -> list[Block]:
        """The transformer blocks in order."""
        return self.stage.blocks

    def weight_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield (index in the layer plan, module) of the layers with weights, in ascending order."""
        for index, layer in enumerate(self.sequential):
            if next(layer.parameters(), None) is not None:
                yield index, layer

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """Return an empty KV cache of this rank's heads, on the model's device and in its dtype."""
        weight = self.stage.head.weight
        return self.stage.new_cache(batch, max_length, device=weight.device, dtype=weight.dtype)
