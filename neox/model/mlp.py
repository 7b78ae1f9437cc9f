"""The dense MLP of a block.

Legend: B batch, S sequence, H hidden, W width of the MLP, T tensor ranks.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from neox.architecture import ACTIVATIONS as ACTIVATION_SPECS
from neox.architecture import Architecture
from neox.model.context import Aux, BlockContext
from neox.ops import ACTIVATIONS, linear
from neox.parallel import ColumnParallelLinear, ParallelGrid, RowParallelLinear, Summand, TensorOptions


class MLP(nn.Module):
    """H -> W -> H with an activation between. W is split over tensor ranks.

    A gated activation reads two vectors of W features and returns one, so the first product has 2W outputs.

    Every entry of `MLPS` has this constructor, `forward` and `summand`.
    """

    def __init__(self, architecture: Architecture, number: int, grid: ParallelGrid, **options: Unpack[TensorOptions]):
        super().__init__()
        hidden = architecture.hidden_size
        width = architecture.mlp_width
        bias = architecture.mlp_bias
        up_width = width * ACTIVATION_SPECS[architecture.activation].width_factor
        self.activation = ACTIVATIONS[architecture.activation]
        self.dense_h_to_4h = ColumnParallelLinear(hidden, up_width, grid, bias=bias, multiply=linear, **options)
        self.dense_4h_to_h = RowParallelLinear(width, hidden, grid, bias=bias, multiply=linear, **options)

    def forward(self, x: Tensor, context: BlockContext) -> tuple[Tensor, Aux]:
        """Return the output [B, S, H] for x [B, S, H], and the losses that the MLP adds to the objective's."""
        return self.dense_4h_to_h(self._inner(x)), {}

    def summand(self, x: Tensor, context: BlockContext) -> tuple[Summand, Aux]:
        """Return what `forward` does, before the sum over tensor ranks."""
        return self.dense_4h_to_h.summand(self._inner(x)), {}

    def partial(self, x: Tensor) -> Tensor:
        """Return this tensor rank's summand of the output [B, S, H], without the bias."""
        return self.dense_4h_to_h.partial(self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        """Return the activations between the two products: [B, S, H] -> [B, S, W/T]."""
        return self.activation(self.dense_h_to_4h(x))
