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
    """How autograd keeps tensors until the backward pass: DeepSpeed's partitioned and CPU-checkpointed activations.

    Attributes:
        grid: Tensor ranks, which all hold the same tensors.
        divided: Whether each tensor rank keeps a part of the last dim; all parts are gathered in the backward pass.
        on_cpu: Whether they are moved to CPU memory, and back in the backward pass.
    """

    grid: ParallelGrid
    divided: bool = False
    on_cpu: bool = False

    def __call__(self) -> AbstractContextManager[Any]:
        """Return a context in which recomputation keeps its inputs in this way."""
        if not (self.divided or self.on_cpu):
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, x: Tensor) -> tuple[torch.device, Tensor]:
        """Return the device of a tensor [..., H], and the tensor that is kept."""
        if x.numel() == 0:  # torch 2.11 keeps an empty tensor, which is on the CPU, beside the inputs
            return x.device, x
        kept = x
        if self.divided:
            kept = scatter_last_dim(x.detach(), self.grid)
        if self.on_cpu and x.device.type != "cpu":
            # The same stream copies back, so that the host waits for neither copy.
            host = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=True)
            kept = host.copy_(kept, non_blocking=True)
        return x.device, kept

    def unpack(self, packed: tuple[torch.device, Tensor]) -> Tensor:
        """Return the tensor [..., H] again."""
        device, kept = packed
        if kept.numel() == 0:
            return kept
        kept = kept.to(device, non_blocking=True)
        if self.divided:
            kept = gather_last_dim(kept, self.grid)
        return kept
