"""Lines that a person types on rank 0, and their way to the other ranks."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TextIO, TypeVar

import torch.distributed as dist

from neox.launch import report_progress
from neox.parallel import ParallelGrid

Value = TypeVar("Value")
ReadLine = Callable[[str], str | None]
"""Function that shows a prompt and returns a line without its end; None at the end of the input."""

_REPORT_SECONDS = 60.0


def line_reader(source: TextIO | None, write: Callable[[str], None]) -> ReadLine:
    """Return a reader of lines.

    On a terminal it uses `input`, with line editing and history if Python has readline.

    Args:
        source: Input; None means stdin.
        write: Function that prints prompts, and echoes the input lines if the input is not a terminal.
    """
    if source is None and sys.stdin.isatty():
        return _terminal_reader()
    return _stream_reader(source or sys.stdin, write)


def _terminal_reader() -> ReadLine:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")

    def read_line(prompt: str) -> str | None:
        try:
            return input(prompt)
        except EOFError:
            return None

    return read_line


def _stream_reader(source: TextIO, write: Callable[[str], None]) -> ReadLine:
    def read_line(prompt: str) -> str | None:
        write(prompt)
        line = source.readline()
        if not line:
            return None
        text = line.removesuffix("\n")
        write(f"{text}\n")
        return text

    return read_line


def waiting_group(grid: ParallelGrid) -> dist.ProcessGroup | None:
    """Return a group of all ranks that may wait for a person for days; None for a single process.

    The default group's timeout is meant for computers.
    """
    if grid.world_size == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(days=30))


def typed_on_first_rank(
    read: Callable[[], Value | None], grid: ParallelGrid, group: dist.ProcessGroup | None
) -> Value | None:
    """Return what `read` returns on rank 0, on every rank.

    Args:
        read: Function that may wait for a person.
        grid: Process groups.
        group: Group of `waiting_group`.
    """
    box: list[Value | None] = [None]
    with _reporting_progress():
        if grid.rank == 0:
            box = [read()]
        if group is not None:
            dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


@contextmanager
def _reporting_progress() -> Iterator[None]:
    """Report progress to the launcher while waiting for input, so that `hang_timeout` does not end the run."""
    over = threading.Event()

    def report() -> None:
        while not over.wait(_REPORT_SECONDS):
            report_progress()

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
