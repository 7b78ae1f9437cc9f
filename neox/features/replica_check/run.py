"""Comparison of the weights of data-parallel replicas, which detects silent data corruption (flipped bits)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from neox.engine import Engine, Feature, RunStart, TrainedModel
from neox.errors import ReplicaError
from neox.log import get_logger
from neox.optim import ClippedOptimizer
from neox.parallel import ParallelGrid

_log = get_logger(__name__)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer type by element size in bytes
_MULTIPLIER = 6364136223846793005  # Knuth's multiplier for 64 bits; products wrap around


@torch.no_grad()
def sum_of_bits(tensors: Iterable[Tensor]) -> Tensor:
    """Return a checksum of tensors, int64 []. A single flipped bit always changes it.

    The elements of each tensor are read as integers and added up; the sums of the tensors are combined by a
    multiplicative hash. Contiguous tensors are not copied.

    Args:
        tensors: The tensors. Each is summed on its own device; the result is on the device of the first one. Some
            optimizers keep their counters in CPU memory, which NCCL cannot exchange.
    """
    total: Tensor | None = None
    for tensor in tensors:
        words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
        part = words.sum(dtype=torch.int64)
        total = part if total is None else total * _MULTIPLIER + part.to(total.device)
    if total is None:
        return torch.zeros((), dtype=torch.int64)
    return total


def ranks_that_differ(sums: list[int]) -> list[int]:
    """Return the positions of the checksums that differ from the majority; all positions if there is no majority.

    Args:
        sums: Checksum of each data rank.
    """
    usual, count = Counter(sums).most_common(1)[0]
    if count == len(sums):
        return []
    if 2 * count <= len(sums):
        return list(range(len(sums)))
    return [position for position, value in enumerate(sums) if value != usual]


def build(model: TrainedModel, start: RunStart) -> ReplicaCheck | None:
    """Return the check; None without `check_replicas_every`."""
    every = model.plan.config.healing.check_replicas_every
    if every is None:
        return None
    whole_optimizer = None if model.divides_optimizer else model.optimizer
    return ReplicaCheck(every, model.grid, model.module, whole_optimizer)


class ReplicaCheck(Feature):
    """Check that all data ranks hold the same weights.

    Args:
        every: Number of steps between two checks.
        grid: This rank's position in the parallel grid, and its process groups.
        model: This rank's part of the model.
        optimizer: The optimizer, if each data rank holds its whole state; None if the state is sharded.
    """

    def __init__(self, every: int, grid: ParallelGrid, model: nn.Module, optimizer: ClippedOptimizer | None) -> None:
        self._every = every
        self._group = grid.dp_group
        self._size = 1
        if self._group is not None:
            self._size = dist.get_world_size(self._group)
        self._model = model
        self._optimizer = optimizer
        self._last_checked: int | None = None  # step
        if self._size == 1:
            _log.warning("check_replicas_every: there is one data rank, so there is nothing to compare")

    def load(self, engine: Engine, start: RunStart) -> None:
        """Forget which step was checked last, because steps are repeated after a rollback."""
        self._last_checked = None

    def before_update(self, engine: Engine) -> None:
        """Run the check if it is due. Raises ReplicaError if the ranks differ."""
        self.check_if_due(engine.iteration + 1)

    def before_save(self, engine: Engine) -> None:
        """Run the check, so that no corrupt weights are saved. Raises ReplicaError if the ranks differ."""
        self.check(engine.iteration)

    def check_if_due(self, step: int) -> None:
        """Run the check if it is due at this step (counted from 1), at most once per step."""
        if step % self._every == 0 and step != self._last_checked:
            self._last_checked = step
            self.check(step)

    def check(self, step: int) -> None:
        """Compare the checksums of all data ranks; all of them call it together.

        Args:
            step: The step, for the message.

        Raises:
            ReplicaError: The checksums differ. The error names the ranks that differ from the majority.
        """
        if self._size == 1:
            return
        own = sum_of_bits(self._tensors()).reshape(1)
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(gathered, own, group=self._group)
        members = dist.get_process_group_ranks(self._group)
        different = ranks_that_differ(torch.cat(gathered).tolist())
        if not different:
            return
        if len(different) == self._size:
            names = ", ".join(map(str, members))
            raise ReplicaError(
                f"step {step}: the weights of the data ranks {names} differ, and there is no majority that shows which "
                "ones are right. Faulty memory, a faulty link or a faulty processor has flipped bits; check the hosts",
                step,
                (),
            )
        ranks = tuple(members[position] for position in different)
        names = ", ".join(map(str, ranks))
        raise ReplicaError(
            f"step {step}: the weights of rank {names} differ from those of the other data ranks. Faulty memory, a "
            "faulty link or a faulty processor has flipped bits; check the host of this rank",
            step,
            ranks,
        )

    def _tensors(self) -> Iterator[Tensor]:
        """Yield the weights, and the optimizer's tensors if they are not sharded."""
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
