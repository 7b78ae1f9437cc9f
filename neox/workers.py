"""Worker processes that apply a function to many items, in order; a worker that dies is replaced once.

    items -> queue -> thread 1 <-> worker process 1
                      thread 2 <-> worker process 2
                      ...                           -> results, in the order of the items

A worker gets the function once, then one item at a time.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

from neox.errors import DataError, NeoXError
from neox.log import get_logger

_log = get_logger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_ITEMS_PER_WORKER = 2
# Imported once, by the process from which workers are forked. None is a module of ours, because the import path of that
# process may lead to another installation.
_PRELOADED = ["numpy", "orjson", "pydantic", "yaml", "zstandard"]


def worker_count(workers: int) -> int:
    """Return the number of processes for a setting, in which 0 means one for each core."""
    return workers or len(os.sched_getaffinity(0))


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int) -> Generator[tuple[T, R]]:
    """Yield each item with its result, in order; at most two items for each worker are held.

    Args:
        function: Function of an item. It is pickled, and so are items and results.
        items: Items, read as workers become free.
        workers: Number of processes; 0 means one for each core. For one worker, the function runs in this process.

    Raises:
        DataError: If a worker died twice on an item.
        Exception: An exception of `function`.
    """
    workers = worker_count(workers)
    if workers == 1:
        for item in items:
            yield item, function(item)
        return
    with WorkerPool(function, workers) as pool:
        yield from pool.map(items, limit=_ITEMS_PER_WORKER * workers)


def read_ahead(items: Iterable[T]) -> Generator[T]:
    """Yield items; a thread reads the next one meanwhile."""
    iterator = iter(items)
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(_next, iterator)
        while (found := following.result()) is not None:
            following = thread.submit(_next, iterator)
            yield found.item


@dataclass(frozen=True)
class _Item(Generic[T]):
    item: T


def _next(iterator: Iterator[T]) -> _Item[T] | None:
    for item in iterator:
        return _Item(item)
    return None


class WorkerPool(Generic[T, R]):
    """Worker processes, started as items come and ended by the context manager."""

    def __init__(self, function: Callable[[T], R], workers: int, *, name: Callable[[T], str] | None = None) -> None:
        """Make a pool without processes.

        Args:
            function: Function of an item. It is pickled, and so are items and results.
            workers: Most processes; fewer are started if there are fewer items.
            name: Function that returns what messages call an item; None leaves items out of messages.
        """
        self._function = function
        self._most_workers = workers
        self._name = name
        self._workers: list[_Worker] = []
        self._tasks: SimpleQueue[tuple[T, Future[R]] | None] = SimpleQueue()
        self._closed = False

    def __enter__(self) -> WorkerPool[T, R]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._closed = True
        for worker in self._workers:
            self._tasks.put(None)
            worker.stop()

    def map(
        self, items: Iterable[T], *, limit: int, size: Callable[[T], int] = lambda item: 1
    ) -> Generator[tuple[T, R]]:
        """Yield each item with its result, in order.

        Args:
            items: Items, read in the caller's thread while the limit allows more.
            limit: Most that the items between reading and the caller may weigh together; one item may always be there.
            size: Function that returns the weight of an item; the default counts items.

        Raises:
            DataError: If a worker died twice on an item.
            Exception: An exception of the pool's function, instead of the result of its item.
        """
        held: deque[tuple[T, Future[R]]] = deque()
        weight = 0
        for item in items:
            added = size(item)
            while held and (weight + added > limit or held[0][1].done()):
                first, result = held.popleft()
                yield first, result.result()
                weight -= size(first)
            held.append((item, self._submit(item)))
            weight += added
        while held:
            first, result = held.popleft()
            yield first, result.result()

    def _submit(self, item: T) -> Future[R]:
        result: Future[R] = Future()
        self._tasks.put((item, result))
        if len(self._workers) < self._most_workers:
            worker = _Worker(self._function)
            self._workers.append(worker)
            threading.Thread(target=self._feed, args=(worker,), daemon=True).start()
        return result

    def _feed(self, worker: _Worker) -> None:
        """Give items to a worker until the pool is closed."""
        while (task := self._tasks.get()) is not None and not self._closed:
            item, result = task
            try:
                result.set_result(worker.apply(item))
            except WorkerDied as death:
                result.set_exception(self._death(item, death))
            except BaseException as error:  # raised again in the caller's thread
                result.set_exception(error)

    def _death(self, item: T, death: WorkerDied) -> DataError:
        place = "" if self._name is None else f"{self._name(item)}: "
        return DataError(
            f"{place}a worker {death} on this part of the input, twice. If memory ran out, give fewer --workers, or a "
            "smaller --memory-mb where there is one; the same command resumes"
        )


class WorkerDied(Exception):
    """End of a worker process before it returned a result; the message says how it ended."""


@dataclass(frozen=True)
class _Failure:
    """Exception of the function, sent in place of a result."""

    error: Exception


class _Worker:
    """Worker process and the connection to it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._has_function = False
        self._stopping = False
        self._process, self._connection = _start_process()

    def apply(self, item: Any) -> Any:
        """Apply the function in the process, which is replaced if it dies, but once. Raises WorkerDied."""
        try:
            return self._exchange(item)
        except (EOFError, OSError):
            reason = self._exit_reason()
            if self._stopping:
                raise WorkerDied(reason) from None
        _log.warning("a worker %s: starting another, which repeats its part", reason)
        self._connection.close()
        self._has_function = False
        self._process, self._connection = _start_process()
        if self._stopping:
            self._process.terminate()
        try:
            return self._exchange(item)
        except (EOFError, OSError):
            raise WorkerDied(self._exit_reason()) from None

    def _exchange(self, item: Any) -> Any:
        if not self._has_function:
            self._connection.send(self._function)
            self._has_function = True
        self._connection.send(item)
        result = self._connection.recv()
        if isinstance(result, _Failure):
            raise result.error
        return result

    def _exit_reason(self) -> str:
        self._process.join(timeout=5)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"was killed by signal {-code}"
        return f"ended with exit code {code}"

    def stop(self) -> None:
        """End the process; a thread that waits for its result gets WorkerDied."""
        self._stopping = True
        self._process.terminate()
        self._process.join()


def _start_process() -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # then the death of the process closes the pipe
    return process, ours


def _serve(connection: Connection) -> None:
    """Run a worker process: receive the function, then apply it to items until the other side closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # there is one process for each core
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        function = connection.recv()
        while True:
            item = connection.recv()
            result = _result(function, item)
            try:
                connection.send(result)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                connection.send(_Failure(RuntimeError(f"a worker cannot send {type(result).__name__}: {error}")))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the main process has ended or has no more work


def _result(function: Callable[[Any], Any], item: Any) -> Any:
    try:
        return function(item)
    except NeoXError as error:
        return _Failure(error)
    except Exception as error:
        error.add_note(f"in a worker process:\n{traceback.format_exc()}")
        return _Failure(error)


def _end_with_parent() -> None:
    """End this process when the one that started it ends, even while the function runs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
