"""Comparison of the weights on data ranks, which finds bits that a memory, a link or a processor has changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from neox.errors import ReplicaError
from neox.log import get_logger
from neox.optim import ClippedOptimizer
from neox.parallel import ParallelGrid

_log = get_logger(__name__)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_MULTIPLIER = 6364136223846793005  # Knuth's, of 64 bits; products wrap around


@torch.no_grad()
def sum_of_bits(tensors: Iterable[Tensor]) -> Tensor:
    """Return a checksum of tensors, int64 []. One changed bit always changes it.

    It is the sum of the elements' bits read as integers, mixed over tensors. Nothing is copied.

    Args:
        tensors: Tensors on one device; those on others are summed there.
    """
    total = torch.zeros((), dtype=torch.int64)
    for tensor in tensors:
        words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
        part = words.sum(dtype=torch.int64)
        total = total.to(part.device) * _MULTIPLIER + part
    return total


def ranks_that_differ(sums: list[int]) -> list[int]:
    """Return the positions of the checksums that differ from most; all positions if there is no majority.

    Args:
        sums: Checksum of each data rank.
    """
    usual, count = Counter(sums).most_common(1)[0]
    if count == len(sums):
        return []
    if 2 * count <= len(sums):
        return list(range(len(sums)))
    return [position for position, value in enumerate(sums) if value != usual]


class ReplicaCheck:
    """Check that all data ranks hold the same weights.

    Args:
        every: Number of steps between two checks.
        grid: This rank's grid.
        model: Model of this rank.
        optimizer: The optimizer, if all data ranks hold its whole state; None if they divide it.
    """

    def __init__(self, every: int, grid: ParallelGrid, model: nn.Module, optimizer: ClippedOptimizer | None) -> None:
        self._every = every
        self._group = grid.dp_group
        self._size = 1
        if self._group is not None:
            self._size = dist.get_world_size(self._group)
        self._model = model
        self._optimizer = optimizer
        self._checked: int | None = None  # the last step
        if self._size == 1:
            _log.warning("check_replicas_every: there is one data rank, so there is nothing to compare")

    def check_if_due(self, step: int) -> None:
        """Check before the update of a step, counted from 1, if it is due; once a step."""
        if step % self._every == 0 and step != self._checked:
            self._checked = step
            self.check(step)

    def check(self, step: int) -> None:
        """Compare the checksums of all data ranks, which call it together.

        Args:
            step: The step, for the message.

        Raises:
            ReplicaError: If they differ, with the ranks that differ from most.
        """
        if self._size == 1:
            return
        own = sum_of_bits(self._tensors()).reshape(1)
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(gathered, own, group=self._group)
        members = dist.get_process_group_ranks(self._group)
        different = ranks_that_differ([int(value) for value in gathered])
        if not different:
            return
        if len(different) == self._size:
            names = ", ".join(map(str, members))
            raise ReplicaError(
                f"step {step}: the weights of the data ranks {names} differ, and no majority says which are right: "
                "a memory, a link or a processor has changed bits; check their hosts",
                step,
                (),
            )
        ranks = tuple(members[position] for position in different)
        names = ", ".join(map(str, ranks))
        raise ReplicaError(
            f"step {step}: the weights of rank {names} differ from those of the other data ranks: a memory, a link or "
            "a processor has changed bits; check its host",
            step,
            ranks,
        )

    def _tensors(self) -> Iterator[Tensor]:
        """Yield the weights, and the optimizer's tensors if every data rank has all of them."""
        yield from self._model.parameters()
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            for tensor in group["params"]:
                yield tensor
                state = self._optimizer.state.get(tensor, {})
                for name in sorted(state):
                    if isinstance(state[name], Tensor):
                        yield state[name]
