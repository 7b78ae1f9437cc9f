"""What all ranks must decide alike: whether each of them succeeded, and what rank 0 found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from neox.errors import CheckpointError, NeoXError

T = TypeVar("T")


def all_succeeded(action: Callable[[], object], what: str, group: dist.ProcessGroup | None = None) -> None:
    """Run `action` on this rank and raise CheckpointError on every rank if it failed on any, naming the first.

    action must not leave collectives unfinished when it fails. group: of all ranks, for threads beside training's.
    """
    problem: str | None = None
    try:
        action()
    except (NeoXError, OSError, RuntimeError) as error:
        problem = str(error) or type(error).__name__
    answers: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, problem, group=group)
    failed = [(rank, answer) for rank, answer in enumerate(answers) if answer is not None]
    if failed:
        rank, answer = failed[0]
        others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise CheckpointError(f"{what} failed on rank {rank}{others}: {answer}")


def from_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on rank 0 and return its result on every rank; a NeoXError is raised on every rank."""
    answer: list[tuple[T | None, NeoXError | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            answer[0] = (action(), None)
        except NeoXError as error:
            answer[0] = (None, error)
    dist.broadcast_object_list(answer, src=0, group=group)
    result, error = answer[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
