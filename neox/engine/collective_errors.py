"""Actions whose result or error must be the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from neox.errors import CheckpointError, NeoXError

T = TypeVar("T")


def all_succeeded(action: Callable[[], object], what: str, group: dist.ProcessGroup | None = None) -> None:
    """Run an action on every rank, and fail on every rank if it failed on any.

    Args:
        action: Must not leave collective operations unfinished when it fails.
        what: Description of the action for the message ("saving iteration 10").
        group: Group of all ranks for a thread that runs beside training; the default group if None.

    Raises:
        CheckpointError: With the message of the first rank that failed.
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
    """Run an action on rank 0 alone and return its result on every rank.

    Args:
        action: Its result, or its NeoXError, must be picklable.
        group: Group of all ranks for a thread that runs beside training; the default group if None.

    Raises:
        NeoXError: On every rank, if the action raised it on rank 0.
    """
    answer: list[tuple[T | None, NeoXError | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            answer[0] = (action(), None)
        except NeoXError as error:
            answer[0] = (None, error)
    dist.broadcast_object_list(answer, src=0, group=group)
    result, failure = answer[0]
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]
