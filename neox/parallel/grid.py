"""Coordinates, process groups and random streams of one rank, in one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from neox.parallel.rng import RNGTracker, derive_seed
from neox.plan.ranks.topology import Topology


@dataclass(frozen=True)
class ParallelGrid:
    """One rank of a `Topology`. It is built once and passed as an argument.

    Groups are None if torch.distributed is not initialised (`single`). Code that communicates asks for the size first.

    Attributes:
        topology: Degrees of parallelism.
        rank: Global rank.
        tp_group: Tensor ranks that share the same layers and samples.
        dp_group: Ranks with the same weights: data ranks, and the context ranks of each.
        cp_group: Context ranks, which divide the tokens of the same samples.
        pp_group: Stages of one pipeline.
        model_group: Ranks of one whole model, of all stages and tensor ranks.
        ep_group: Data-parallel ranks that divide the experts of a model; None if they do not.
        edp_group: Data-parallel ranks with the same experts; None if experts are not divided.
        rng: Random streams of this rank.
    """

    topology: Topology
    rank: int
    tp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    model_group: dist.ProcessGroup | None = None
    ep_group: dist.ProcessGroup | None = None
    edp_group: dist.ProcessGroup | None = None
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

        ep_group = None
        edp_group = None
        if topology.ep_size > 1:
            ep_group = own_group(topology.expert_groups())
            edp_group = own_group(topology.expert_data_groups())
        return cls(
            topology,
            rank,
            tp_group=own_group(topology.groups("tp")),
            dp_group=own_group(topology.groups("dp")),
            cp_group=own_group(topology.context_groups()),
            pp_group=own_group(topology.groups("pp")),
            model_group=own_group(topology.groups("pp", "tp")),
            ep_group=ep_group,
            edp_group=edp_group,
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
        """Number of ranks with the same weights."""
        return self.topology.dp_size

    @property
    def data_size(self) -> int:
        """Number of groups of ranks that read different samples."""
        return self.topology.data_size

    @property
    def cp_size(self) -> int:
        """Number of context ranks."""
        return self.topology.cp_size

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.topology.tp_size

    @property
    def ep_size(self) -> int:
        """Number of data-parallel ranks that divide experts."""
        return self.topology.ep_size

    @property
    def ep_rank(self) -> int:
        """This rank's number among those that divide experts."""
        return self.dp_rank % self.ep_size

    @property
    def tp_name(self) -> str:
        """Name of the group of tensor ranks, as functional collectives take it."""
        assert self.tp_group is not None, "a single tensor rank has nobody to communicate with"
        return self.tp_group.group_name

    @property
    def cp_name(self) -> str:
        """Name of the group of context ranks, as functional collectives take it."""
        assert self.cp_group is not None, "a single context rank has nobody to communicate with"
        return self.cp_group.group_name

    @property
    def pp_rank(self) -> int:
        """This rank's pipeline stage."""
        return self.topology.coordinates(self.rank)[0]

    @property
    def dp_rank(self) -> int:
        """This rank's number among those with the same weights."""
        return self.topology.coordinates(self.rank)[1]

    @property
    def data_rank(self) -> int:
        """Number of this rank's group among those that read different samples."""
        return self.dp_rank // self.cp_size

    @property
    def cp_rank(self) -> int:
        """This rank's context-parallel coordinate."""
        return self.dp_rank % self.cp_size

    @property
    def tp_rank(self) -> int:
        """This rank's tensor-parallel coordinate."""
        return self.topology.coordinates(self.rank)[2]

    def seed(self, seed: int) -> None:
        """Seed torch's default stream and the tracker's. Initial weights use neither.

        The default stream is for dropout of replicated tensors: it is equal on all tensor ranks, and different on
        stages and data ranks. With sequence parallelism such tensors do not exist, and it differs on every rank. The
        tracker's stream (`rng.fork`) is for dropout of split tensors, and differs on every rank.
        """
        coordinates = (self.pp_rank, self.dp_rank)
        default = derive_seed(seed, "default", *coordinates)
        if self.topology.sequence_parallel:
            default = derive_seed(seed, "default", *coordinates, self.tp_rank)
        # torch.manual_seed would also queue a call for each kind of accelerator, even if it is absent.
        torch.default_generator.manual_seed(default)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:
            torch.get_device_module(accelerator).manual_seed_all(default)
        self.rng.seed(derive_seed(seed, "tensor", *coordinates, self.tp_rank))
