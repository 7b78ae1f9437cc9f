"""Multi-token prediction: modules that predict tokens further ahead from the network's hidden states.

`neox.architecture.multi_token` has a picture of a module, and `neox.objectives.multi_token` the loss.

Legend: B batch, S sequence, H hidden, D modules, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

import torch
from torch import Tensor, nn

from neox.model.blocks import BLOCKS
from neox.model.context import Aux, BlockContext
from neox.model.embedding import FinalNorm
from neox.model.recomputation import Recomputation
from neox.ops import build_norm
from neox.parallel import (
    ColumnParallelLinear,
    ParallelGrid,
    TensorOptions,
    TokenShares,
    gather_last_dim,
    gather_tokens,
    scatter_tokens,
)
from neox.plan.run_plan import RunPlan


class MultiTokenLayer(TokenShares):
    """One module: hidden states of the depth before and vectors of later tokens -> hidden states of its depth.

    Args:
        plan: Plan of the run.
        grid: Process groups.
        **options: Device and type of the parameters.
    """

    def __init__(self, plan: RunPlan, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        network = plan.architecture
        hidden = network.hidden_size
        last = network.num_layers - 1
        self.grid = grid
        self.enorm = build_norm(network, **options)
        self.hnorm = build_norm(network, **options)
        self.eh_proj = ColumnParallelLinear(2 * hidden, hidden, grid, bias=False, **options)
        self.block = BLOCKS[network.attention[last]](plan, last, grid, **options)
        self.shared_head = FinalNorm(network, **options)
        self.recomputation = Recomputation.from_plan(plan, grid, [last])

    def forward(self, hidden: Tensor, ahead: Tensor, context: BlockContext) -> tuple[Tensor, Aux]:
        """Run the module. With sequence parallelism all but its ends is computed on this rank's share of the tokens.

        Args:
            hidden: Hidden states of the depth before, after a norm [B, S, H].
            ahead: Vectors of the later tokens [B, S, H]; with sequence parallelism this rank's share [B, S/T, H].
            context: Positions and masks of the block.

        Returns:
            Hidden states of this depth after a norm [B, S, H], for the head and the next module, and the block's
            losses.
        """
        divided = self.shares > 1
        if divided:
            hidden = scatter_tokens(hidden, self.grid)  # [B, S, H] -> [B, S/T, H]
        both = torch.cat((self.enorm(ahead), self.hnorm(hidden)), dim=-1)  # [B, S/T, 2H]
        x = gather_last_dim(self.eh_proj(both), self.grid)  # [B, S, H/T] -> [B, S, H]
        if divided:
            x = scatter_tokens(x, self.grid)  # [B, S, H] -> [B, S/T, H]
        if self.recomputation.acts_on([self.block]) and all(self.recomputation.whole):
            of_block = context._replace(routes={})
            x, aux = self.recomputation.run(lambda inputs: self.block(inputs, of_block), x)
        else:
            x, aux = self.block(x, context)
        if self.block.watch is not None:
            self.block.watch(x)
        if divided:
            x = gather_tokens(x, self.grid)  # [B, S/T, H] -> [B, S, H]
        return self.shared_head(x), aux

    def parameters_on_shares(self) -> Iterable[nn.Parameter]:
        """Return the parameters of both norms before the projection."""
        return [*self.enorm.parameters(), *self.hnorm.parameters()]
