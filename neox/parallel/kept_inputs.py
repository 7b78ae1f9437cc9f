"""Inputs of recomputed blocks, kept divided over tensor ranks or in CPU memory until the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neox.parallel.collectives import gather_last_dim, scatter_last_dim
from neox.parallel.grid import ParallelGrid


@dataclass(frozen=True)
class KeptInputs:
    """How tensors that autograd keeps are kept: DeepSpeed's partitioned and CPU-checkpointed activations.

    Attributes:
        grid: Tensor ranks, which all hold the same tensors.
        divided: Each tensor rank keeps its part of the last dim, and all are gathered in the backward pass.
        on_cpu: They are moved to CPU memory, and back in the backward pass.
    """

    grid: ParallelGrid
    divided: bool = False
    on_cpu: bool = False

    def __call__(self) -> AbstractContextManager[Any]:
        """Return a context; recomputation inside it keeps nothing but the inputs of what it runs."""
        if not (self.divided or self.on_cpu):
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, x: Tensor) -> tuple[torch.device, Tensor]:
        """Return the device of a tensor [..., H], and what is kept of it."""
        kept = scatter_last_dim(x.detach(), self.grid) if self.divided else x
        if self.on_cpu and x.is_cuda:
            # Of the stream that copies back, so that neither copy has to be waited for.
            host = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=True)
            kept = host.copy_(kept, non_blocking=True)
        return x.device, kept

    def unpack(self, packed: tuple[torch.device, Tensor]) -> Tensor:
        """Return the tensor [..., H] again."""
        device, kept = packed
        kept = kept.to(device, non_blocking=True)
        return gather_last_dim(kept, self.grid) if self.divided else kept
