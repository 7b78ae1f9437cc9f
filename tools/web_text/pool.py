"""Worker processes that keep the order of their items, and end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_ITEMS_PER_WORKER = 2


def worker_count(workers: int) -> int:
    """Return a number of processes; 0 means one for each core."""
    return workers or len(os.sched_getaffinity(0))


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int) -> Generator[tuple[T, R]]:
    """Yield each item with its result, in order; only a few items per worker are held.

    Args:
        function: To be pickled, as are items and results. One worker runs it in this process.
        items: Read as workers become free.
        workers: Number of processes; 0 means one for each core.

    Raises:
        BrokenProcessPool: If a process was killed.
        Exception: An exception of `function`.
    """
    workers = worker_count(workers)
    if workers == 1:
        for item in items:
            yield item, function(item)
        return
    context = multiprocessing.get_context("forkserver")
    # Imported once, not in each process. (The server has another import path: our modules could be those of another
    # installation there.)
    context.set_forkserver_preload(["numpy", "orjson", "pydantic", "yaml", "zstandard"])
    pool = ProcessPoolExecutor(workers, context, _start)
    pending: deque[tuple[T, Future[R]]] = deque()
    try:
        for item in items:
            pending.append((item, pool.submit(function, item)))
            if len(pending) >= _ITEMS_PER_WORKER * workers:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
