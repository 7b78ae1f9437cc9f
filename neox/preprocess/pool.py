"""Worker processes that answer blocks in order, within a bound of bytes, and whose death is noticed."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from types import TracebackType

from neox.corpus import BadInput, LineBlock
from neox.errors import DataError
from neox.log import get_logger
from neox.preprocess.worker import EncodedBlock, EncodeJob, receive_result, send_block, serve

_log = get_logger(__name__)


class _Worker:
    """One process and our end of its pipe."""

    def __init__(self) -> None:
        self.job: EncodeJob | None = None
        self.closing = False
        self.process, self.connection = self._start()

    def _start(self) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()  # so that the death of the process closes the pipe
        return process, ours

    def encode(self, block: LineBlock, job: EncodeJob) -> EncodedBlock:
        """Have a block encoded. A worker that dies is replaced and the block tried once more, then DataError."""
        try:
            return self._exchange(block, job)
        except (EOFError, OSError):
            if self.closing:
                raise
            _log.warning("a worker %s; starting another, which does its block again", self._how_it_ended())
            self.connection.close()
            self.job = None
            self.process, self.connection = self._start()
        try:
            return self._exchange(block, job)
        except (EOFError, OSError) as error:
            raise DataError(
                f"{block.file}:{block.start.line} to line {block.end.line - 1}: a worker {self._how_it_ended()} on "
                "these lines, twice. If memory ran out, lower --memory-mb or --workers; the run continues where it was"
            ) from error

    def _exchange(self, block: LineBlock, job: EncodeJob) -> EncodedBlock:
        if self.job is None:
            self.connection.send(job)
            self.job = job
        send_block(self.connection, block)
        return receive_result(self.connection, block, job)

    def _how_it_ended(self) -> str:
        self.process.join(timeout=5)
        code = self.process.exitcode
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"

    def stop(self) -> None:
        """End the process; a thread that waits for its answer gets EOFError."""
        self.closing = True
        self.process.terminate()
        self.process.join()


class BlockPool:
    """Encode blocks in several processes, which start at once; use as a context manager, which ends them.

    in_flight_bytes: text that may be between reading and the consumer at any time (a longer block travels alone).
    """

    def __init__(self, workers: int, in_flight_bytes: int) -> None:
        self._workers = [_Worker() for _ in range(workers)]
        self._limit, self._in_flight = in_flight_bytes, 0
        self._changed = threading.Condition()
        self._tasks: SimpleQueue[tuple[int, LineBlock] | None] = SimpleQueue()
        self._results: dict[int, EncodedBlock | BadInput | BaseException] = {}
        self._end: int | None = None
        self._closed = False

    def __enter__(self) -> BlockPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._workers:
            self._tasks.put(None)
            worker.stop()

    def map(self, blocks: Iterator[LineBlock | BadInput], job: EncodeJob) -> Iterator[EncodedBlock | BadInput]:
        """Do one job. Yield the result of each block, in order; `blocks` is read in a thread, bad inputs pass through.

        An exception of the reader or of a worker is raised where its block would have come.
        """
        threading.Thread(target=self._read, args=(blocks,), daemon=True).start()
        for worker in self._workers:
            threading.Thread(target=self._feed, args=(worker, job), daemon=True).start()
        number = 0
        while True:
            with self._changed:
                while number not in self._results and number != self._end:
                    self._changed.wait()
                if number == self._end:
                    return
                result = self._results.pop(number)
            if isinstance(result, BaseException):
                raise result
            yield result
            if isinstance(result, EncodedBlock):
                with self._changed:
                    self._in_flight -= result.text_bytes
                    self._changed.notify_all()
            number += 1

    def _read(self, blocks: Iterator[LineBlock | BadInput]) -> None:
        number = 0
        try:
            for block in blocks:
                if isinstance(block, BadInput):
                    self._put(number, block)
                elif self._admit(len(block.data)):
                    self._tasks.put((number, block))
                else:
                    return
                number += 1
        except BaseException as error:  # raised again in the consumer's thread
            self._put(number, error)
            return
        with self._changed:
            self._end = number
            self._changed.notify_all()

    def _admit(self, size: int) -> bool:
        """Wait until there is room; False when the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._in_flight or self._in_flight + size <= self._limit)
            self._in_flight += size
            return not self._closed

    def _feed(self, worker: _Worker, job: EncodeJob) -> None:
        while (task := self._tasks.get()) is not None and not self._closed:
            number, block = task
            try:
                result: EncodedBlock | BaseException = worker.encode(block, job)
            except BaseException as error:  # raised again in the consumer's thread
                result = error
            self._put(number, result)

    def _put(self, number: int, result: EncodedBlock | BadInput | BaseException) -> None:
        with self._changed:
            self._results[number] = result
            self._changed.notify_all()
