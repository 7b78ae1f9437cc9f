"""Rank arithmetic of a three-axis grid, without any process: pipe outermost, then data, then tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Degrees along each axis, in ranks; world_size is their product. Same order as NeoX and DeepSpeed's
    `PipeModelDataParallelTopology`, so that neighbouring ranks (one machine) form the tensor groups."""

    pp_size: int = 1
    dp_size: int = 1
    tp_size: int = 1

    def __post_init__(self) -> None:
        if min(self.pp_size, self.dp_size, self.tp_size) < 1:
            raise ValueError(f"every degree must be at least 1, got {self}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp_size * self.dp_size * self.tp_size

    def rank_of(self, pp_rank: int, dp_rank: int, tp_rank: int) -> int:
        """Return the global rank at these coordinates."""
        return (pp_rank * self.dp_size + dp_rank) * self.tp_size + tp_rank

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return (pp_rank, dp_rank, tp_rank) of a global rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        rest, tp_rank = divmod(rank, self.tp_size)
        pp_rank, dp_rank = divmod(rest, self.dp_size)
        return pp_rank, dp_rank, tp_rank

    def tp_groups(self) -> list[list[int]]:
        """List the tensor groups: ranks that share one copy of the same layers."""
        return [
            [self.rank_of(p, d, t) for t in range(self.tp_size)]
            for p in range(self.pp_size)
            for d in range(self.dp_size)
        ]

    def dp_groups(self) -> list[list[int]]:
        """List the data groups: ranks that hold the same weights and see different samples."""
        return [
            [self.rank_of(p, d, t) for d in range(self.dp_size)]
            for p in range(self.pp_size)
            for t in range(self.tp_size)
        ]

    def pp_groups(self) -> list[list[int]]:
        """List the pipeline groups, first stage first."""
        return [
            [self.rank_of(p, d, t) for p in range(self.pp_size)]
            for d in range(self.dp_size)
            for t in range(self.tp_size)
        ]

    def model_groups(self) -> list[list[int]]:
        """List the groups of ranks that together hold one whole model (pipe x tensor)."""
        return [
            [self.rank_of(p, d, t) for p in range(self.pp_size) for t in range(self.tp_size)]
            for d in range(self.dp_size)
        ]
