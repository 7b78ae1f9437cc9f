"""Grid of ranks: degrees of parallelism, and the coordinates and groups that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["pp", "dp", "tp"]
_AXES: tuple[Axis, ...] = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Topology:
    """Degrees of parallelism, in ranks along each axis.

    Ranks are numbered pipe outermost, then data, then tensor, as in NeoX and DeepSpeed's
    `PipeModelDataParallelTopology`, so that neighbouring ranks (one machine) form the tensor groups.

    Attributes:
        pp_size: Pipeline stages.
        dp_size: Data-parallel ranks.
        tp_size: Tensor ranks.
        sequence_parallel: Whether tensor ranks divide the tokens where they do not divide features.
    """

    pp_size: int = 1
    dp_size: int = 1
    tp_size: int = 1
    sequence_parallel: bool = False

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
        """Return (pp_rank, dp_rank, tp_rank) of a global rank.

        Raises:
            ValueError: The rank is outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        rest, tp_rank = divmod(rank, self.tp_size)
        pp_rank, dp_rank = divmod(rest, self.dp_size)
        return pp_rank, dp_rank, tp_rank

    def groups(self, *axes: Axis) -> list[list[int]]:
        """List the groups of ranks that differ only in their coordinates along `axes`.

        `tp`: ranks that share one copy of the same layers. `dp`: ranks with the same weights and different samples.
        `pp`: the stages of one pipeline, first stage first. `pp` and `tp`: ranks that together hold one whole model.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            fixed = (at for axis, at in zip(_AXES, self.coordinates(rank), strict=True) if axis not in axes)
            groups.setdefault(tuple(fixed), []).append(rank)
        return list(groups.values())
