"""Exchange of tokens between the data-parallel ranks that divide experts (`expert_model_parallel_size`).

Gradients of experts come from the tokens of all ranks of the group, so they are sums over these ranks. Summed over the
ranks that hold the same experts, and divided by the number of all data ranks, they are means like other gradients.

Legend: R rows of this rank's tokens, Q rows of this rank's experts, E experts, P ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from neox.parallel.grid import ParallelGrid


def mark_divided_experts(parameter: nn.Parameter, grid: ParallelGrid) -> nn.Parameter:
    """Mark which part of a stack of experts a parameter is, and return it. Without a mark it is whole.

    (DeepSpeed's own mark, `allreduce`, would make it look for groups that only its own layers create.)
    """
    if grid.ep_size > 1:
        parameter.part_of_experts = (grid.ep_rank, grid.ep_size)  # type: ignore[attr-defined]
    return parameter


def holds_divided_experts(parameter: Tensor) -> bool:
    """Return whether a parameter holds only this rank's part of the experts."""
    return hasattr(parameter, "part_of_experts")


def own_experts(full: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of a stack of all experts [E, ...] that a parameter holds [E/P, ...]; all without a mark."""
    if not holds_divided_experts(parameter):
        return full
    rank, size = parameter.part_of_experts  # type: ignore[attr-defined]
    return full.chunk(size)[rank]


def first_own_element(parameter: Tensor) -> int:
    """Return the number of a parameter's first element among those of the stack of all experts; 0 without a mark."""
    if not holds_divided_experts(parameter):
        return 0
    rank, _ = parameter.part_of_experts  # type: ignore[attr-defined]
    own = getattr(parameter, "ds_numel", parameter.numel())  # ZeRO 3 leaves the parameter empty
    return int(rank) * int(own)


def gather_experts(own: Tensor, grid: ParallelGrid) -> Tensor:
    """Return the stack of all experts [E, ...] from the parts of the group's ranks; these call it together."""
    parts = [torch.empty_like(own) for _ in range(grid.ep_size)]
    dist.all_gather(parts, own.contiguous(), group=grid.ep_group)
    return torch.cat(parts)


@dataclass(frozen=True)
class Exchange:
    """Where the rows of tokens and experts go.

    Attributes:
        group: The ranks that divide experts.
        sent: Number of rows that this rank sends to each rank of the group.
        received: Number of rows that it receives from each.
        order: Position among received rows of each row in the order of this rank's experts [Q].
        counts: Number of rows of each of this rank's experts [E/P].
    """

    group: dist.ProcessGroup
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Tensor
    counts: Tensor

    @property
    def rows(self) -> int:
        """Number of rows of this rank's tokens."""
        return sum(self.sent)

    @classmethod
    def plan(cls, counts: Tensor, grid: ParallelGrid) -> Exchange:
        """Agree on the exchange of rows that are sorted by expert; all ranks of the group call it together.

        Args:
            counts: Number of this rank's rows for each expert [E].
            grid: Process groups.
        """
        assert grid.ep_group is not None
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=grid.ep_group)
        by_source = arriving.view(grid.ep_size, -1)  # [P, E/P]
        by_target = counts.view(grid.ep_size, -1)
        # The host needs the shapes of what is sent and received: it waits once.
        sent, received = torch.stack((by_target.sum(1), by_source.sum(1))).tolist()
        # Rows arrive by source, and for each source by expert. A stable sort by expert puts them in order.
        experts = torch.arange(by_source.shape[1], device=counts.device).repeat(grid.ep_size)
        arrived = experts.repeat_interleave(by_source.flatten(), output_size=sum(received))
        return cls(grid.ep_group, tuple(sent), tuple(received), arrived.argsort(stable=True), by_source.sum(0))

    def to_experts(self, rows: Tensor) -> Tensor:
        """Send this rank's rows [R, H] to their experts, and return the rows of this rank's experts [Q, H]."""
        arrived: Tensor = _AllToAll.apply(rows, self, self.sent, self.received)
        return arrived[self.order]

    def from_experts(self, rows: Tensor) -> Tensor:
        """Send the results of this rank's experts [Q, H] back, and return those of this rank's rows [R, H]."""
        by_source = torch.empty_like(rows).index_copy(0, self.order, rows)
        returned: Tensor = _AllToAll.apply(by_source, self, self.received, self.sent)
        return returned


def _exchanged(rows: Tensor, exchange: Exchange, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
    result = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=exchange.group)
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
        ctx.exchange = exchange
        ctx.sizes = (sent, received)
        return _exchanged(rows, exchange, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _exchanged(grad, ctx.exchange, received, sent), None, None, None
