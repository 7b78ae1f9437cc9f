"""Recomputation of blocks in the backward pass, several neighbouring ones at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neox.model.block import Block
from neox.model.context import Aux
from neox.parallel import KeptInputs, ParallelGrid
from neox.plan.run_plan import RunPlan

RunBlocks = Callable[[Tensor], tuple[Tensor, Aux]]


@dataclass(frozen=True)
class Recomputation:
    """Which blocks of a stage are computed again in the backward pass, and how their inputs are kept until then.

    Attributes:
        grid: Process groups.
        whole: For each block of the stage, whether it is recomputed as a whole.
        chunk_size: Most neighbouring blocks that are recomputed together; 0 for no recomputation.
        kept_inputs: How the inputs of chunks are kept.
    """

    grid: ParallelGrid
    whole: tuple[bool, ...]
    chunk_size: int
    kept_inputs: KeptInputs

    @classmethod
    def from_plan(cls, plan: RunPlan, grid: ParallelGrid, numbers: Sequence[int]) -> Recomputation:
        """Return the recomputation of the blocks with these numbers."""
        training = plan.config.training
        divided = training.partition_activations and grid.tp_size > 1
        return cls(
            grid,
            whole=tuple(training.recomputed_part(number) == "full" for number in numbers),
            chunk_size=training.checkpoint_num_layers if training.checkpoint_activations else 0,
            kept_inputs=KeptInputs(grid, divided=divided, on_cpu=training.checkpoint_in_cpu),
        )

    def acts_on(self, blocks: Sequence[Block]) -> bool:
        """Return whether a forward pass through these blocks keeps less now: only in training."""
        return self.chunk_size > 0 and blocks[0].training and torch.is_grad_enabled()

    def chunks(self) -> list[tuple[bool, slice]]:
        """Return runs of blocks, and whether each is recomputed: at most `chunk_size` of those, and those between."""
        result = []
        start = 0
        while start < len(self.whole):
            recomputed = self.whole[start]
            longest = self.chunk_size if recomputed else len(self.whole)
            stop = start + 1
            while stop < len(self.whole) and stop - start < longest and self.whole[stop] == recomputed:
                stop += 1
            result.append((recomputed, slice(start, stop)))
            start = stop
        return result

    def run(self, function: RunBlocks, x: Tensor) -> tuple[Tensor, Aux]:
        """Call a function, keeping only its input; its activations are computed again in the backward pass."""
        with self.kept_inputs():
            result: tuple[Tensor, Aux] = self.grid.rng.checkpoint(function, x)
        return result
