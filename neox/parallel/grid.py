"""Coordinates, process groups and random streams of one rank, in one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from neox.parallel.rng import RNGTracker, derive_seed
from neox.plan.topology import Topology


@dataclass(frozen=True)
class ParallelGrid:
    """One rank of a `Topology`, built once and passed as an argument.

    Groups are None where they would hold this rank alone and nothing was initialised (`single`); code that communicates
    asks for the size first. model_group: the ranks of one whole model (pipe x tensor).
    """

    topology: Topology
    rank: int
    tp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    model_group: dist.ProcessGroup | None = None
    rng: RNGTracker = field(default_factory=RNGTracker, compare=False)

    @classmethod
    def single(cls) -> ParallelGrid:
        """Return the grid of one rank; no process group is needed."""
        return cls(Topology(), 0)

    @classmethod
    def build(cls, topology: Topology) -> ParallelGrid:
        """Create the groups of every axis; all ranks call it together, with torch.distributed initialised.

        Raises:
            ValueError: If the world has another size than the topology.
        """
        world = dist.get_world_size()
        if world != topology.world_size:
            raise ValueError(f"{topology} needs {topology.world_size} ranks, the process group has {world}")
        rank = dist.get_rank()

        def own_group(groups: list[list[int]]) -> dist.ProcessGroup:
            # Every rank must create every group, in the same order.
            created = [(ranks, dist.new_group(ranks)) for ranks in groups]
            return next(group for ranks, group in created if rank in ranks)

        return cls(
            topology,
            rank,
            tp_group=own_group(topology.groups("tp")),
            dp_group=own_group(topology.groups("dp")),
            pp_group=own_group(topology.groups("pp")),
            model_group=own_group(topology.groups("pp", "tp")),
            rng=RNGTracker(enabled=topology.tp_size > 1 and not topology.sequence_parallel),
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return self.topology.pp_size

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.topology.dp_size

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.topology.tp_size

    @property
    def tp_name(self) -> str:
        """Name of the group of tensor ranks, as functional collectives take it."""
        assert self.tp_group is not None, "one tensor rank has nobody to communicate with"
        return self.tp_group.group_name

    @property
    def pp_rank(self) -> int:
        """This rank's pipeline stage."""
        return self.topology.coordinates(self.rank)[0]

    @property
    def dp_rank(self) -> int:
        """This rank's data-parallel coordinate."""
        return self.topology.coordinates(self.rank)[1]

    @property
    def tp_rank(self) -> int:
        """This rank's tensor-parallel coordinate."""
        return self.topology.coordinates(self.rank)[2]

    def seed(self, seed: int) -> None:
        """Seed torch's default streams and the tracker's.

        Default stream: equal over tensor ranks (dropout of replicated tensors), different over stages and data ranks.
        Tracker's stream (`rng.fork`): different on every rank (dropout of split tensors). Initial weights use neither.
        Where tensor ranks divide tokens no dropout is of a replicated tensor: the default stream differs on every rank.
        """
        coordinates = (self.pp_rank, self.dp_rank)
        own = (self.tp_rank,) if self.topology.sequence_parallel else ()
        default = derive_seed(seed, "default", *coordinates, *own)
        # torch.manual_seed also queues calls for accelerators that are absent, every time.
        torch.default_generator.manual_seed(default)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(default)
        self.rng.seed(derive_seed(seed, "tensor", *coordinates, self.tp_rank))
