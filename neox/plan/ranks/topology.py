"""Grid of ranks: degrees of parallelism, and the coordinates and groups that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from neox.config.neox_config import NeoXConfig
from neox.config.sections.runner import ContextKind
from neox.problems import Problem

Axis = Literal["pp", "dp", "tp"]
_COPIES = "zero_optimization.zero_hpz_partition_size"
_AXES: tuple[Axis, ...] = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Topology:
    """Degrees of parallelism, in ranks along each axis.

    Ranks are numbered pipe outermost, then data, then tensor, as in NeoX and DeepSpeed's
    `PipeModelDataParallelTopology`, so that neighbouring ranks (one machine) form the tensor groups.

    Attributes:
        pp_size: Pipeline stages.
        dp_size: Ranks with the same weights. Neighbouring `cp_size` of them divide the tokens of the same samples.
        tp_size: Tensor ranks.
        sequence_parallel: Whether tensor ranks divide the tokens between layers that split features.
        cp_size: Context ranks, a divisor of `dp_size`.
        cp_kind: What context ranks exchange in attention.
        ep_size: Data-parallel ranks that divide experts: neighbouring ones, each with as many experts.
    """

    pp_size: int = 1
    dp_size: int = 1
    tp_size: int = 1
    sequence_parallel: bool = False
    cp_size: int = 1
    cp_kind: ContextKind = "all_gather"
    ep_size: int = 1

    def __post_init__(self) -> None:
        if min(self.pp_size, self.dp_size, self.tp_size, self.ep_size) < 1:
            raise ValueError(f"every degree must be at least 1, got {self}")
        if self.cp_size < 1 or self.dp_size % self.cp_size:
            raise ValueError(f"context ranks must divide the ranks with the same weights, got {self}")
        if self.dp_size % self.ep_size:
            raise ValueError(f"the expert degree must divide the data-parallel ranks, got {self}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp_size * self.dp_size * self.tp_size

    @property
    def data_size(self) -> int:
        """Number of groups of ranks that read different samples: the ranks with the same weights / context ranks."""
        return self.dp_size // self.cp_size

    def context_groups(self) -> list[list[int]]:
        """List the groups of ranks that divide the tokens of the same samples, in the order of context ranks."""
        groups = []
        for same_weights in self.groups("dp"):
            for first in range(0, self.dp_size, self.cp_size):
                groups.append(same_weights[first : first + self.cp_size])
        return groups

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
            coordinates = zip(_AXES, self.coordinates(rank), strict=True)
            fixed = tuple(at for axis, at in coordinates if axis not in axes)
            groups.setdefault(fixed, []).append(rank)
        return list(groups.values())

    def neighbouring_groups(self, size: int) -> list[list[int]]:
        """List the groups of `size` neighbouring data ranks: 0 to size - 1, ..."""
        groups = []
        for ranks in self.groups("dp"):
            for start in range(0, self.dp_size, size):
                groups.append(ranks[start : start + size])
        return groups

    def expert_groups(self) -> list[list[int]]:
        """List the groups of ranks that together hold all experts of their layers."""
        return self.neighbouring_groups(self.ep_size)

    def expert_data_groups(self) -> list[list[int]]:
        """List the groups of ranks that hold the same experts: every ep-th data rank."""
        groups = []
        for ranks in self.groups("dp"):
            for first in range(self.ep_size):
                groups.append(ranks[first :: self.ep_size])
        return groups


def solve_grid(config: NeoXConfig, world_size: int, problems: list[Problem]) -> Topology | None:
    """Return the degrees, with dp = world_size / (pp x tp), context ranks included.

    Args:
        config: The degrees that were asked for.
        world_size: Number of ranks.
        problems: Takes the problem of a world that cannot be divided. There is no grid then.
    """
    tp_size = config.parallelism.model_parallel_size
    pp_size = _stages_of(config)
    cp_size = config.parallelism.context_parallel_size
    model_ranks = model_ranks_of(config)
    if world_size < 1 or world_size % model_ranks:
        problems.append(_indivisible_world(config, world_size, model_ranks))
        return None
    divides_tokens = tp_size > 1 and config.parallelism.sequence_parallel
    dp_size = world_size // (pp_size * tp_size)
    ep_size = config.parallelism.expert_model_parallel_size
    if dp_size % ep_size:
        key = "expert_model_parallel_size"
        rule = f"does not divide the {dp_size} data-parallel ranks; use a divisor of {dp_size}"
        problems.append(config.problem(key, rule, "pipe_parallel_size", "model_parallel_size"))
        return None
    copies = config.deepspeed.zero_optimization.zero_hpz_partition_size or 1
    if dp_size % copies:
        rule = f"does not divide the {dp_size} data-parallel ranks; use a divisor of {dp_size}"
        problems.append(config.problem(_COPIES, rule, "pipe_parallel_size", "model_parallel_size"))
        return None
    cp_kind = config.parallelism.context_parallel_kind
    return Topology(pp_size, dp_size, tp_size, divides_tokens, cp_size, cp_kind, ep_size)


def model_ranks_of(config: NeoXConfig) -> int:
    """Return the number of ranks of one model replica: pipeline x tensor x context ranks."""
    parallelism = config.parallelism
    return _stages_of(config) * parallelism.model_parallel_size * parallelism.context_parallel_size


def _stages_of(config: NeoXConfig) -> int:
    return max(1, config.parallelism.pipe_parallel_size)  # in NeoX, 0 and 1 both mean one stage


def _indivisible_world(config: NeoXConfig, world_size: int, model_ranks: int) -> Problem:
    """Return the problem of a world that is no multiple of the ranks that hold one copy of the model."""
    fewer = world_size // model_ranks * model_ranks
    nearest = [model_ranks]
    if fewer > 0:
        nearest = [fewer, fewer + model_ranks]
    keys: tuple[str, ...] = ("pipe_parallel_size", "model_parallel_size")
    if config.parallelism.context_parallel_size > 1:
        keys = (*keys, "context_parallel_size")
    degrees = " x ".join(map(config.describe_setting, keys))
    gpus = "1 GPU" if world_size == 1 else f"{world_size} GPUs"
    message = (
        f"{gpus} cannot be divided into copies of the model on {model_ranks}: {degrees}; "
        f"use {' or '.join(map(str, nearest))} GPUs, or other degrees"
    )
    return Problem(keys, message)
