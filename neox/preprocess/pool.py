"""Pool of worker processes that encode blocks in order, with bounded memory; dead workers are replaced.

Buffers are sent as they are, without pickling.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import numpy as np
import orjson

from neox.corpus import BadInput, LineBlock, Position
from neox.errors import DataError, NeoXError, TokenizerError
from neox.log import get_logger
from neox.preprocess.chat import ChatEncoder
from neox.preprocess.encode import BlockEncoder, EncodedBlock, EncodedKey, EncodeJob
from neox.tokenizer import Tokenizer

_log = get_logger(__name__)


def serve(connection: Connection) -> None:
    """Run a worker process: receive a job, then encode blocks until the other side closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # there is one process per core
    try:
        job: EncodeJob = connection.recv()
        try:
            encoder: BlockEncoder | ChatEncoder | NeoXError = build_encoder(job)
        except NeoXError as error:
            encoder = error
        while True:
            header = orjson.loads(connection.recv_bytes())
            block = LineBlock(
                header["file"], connection.recv_bytes(), Position(*header["start"]), Position(*header["end"])
            )
            try:
                if isinstance(encoder, NeoXError):
                    raise encoder
                _send_result(connection, encoder.encode(block))
            except NeoXError as error:
                connection.send_bytes(orjson.dumps({"error": str(error)}))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the main process has ended or has no more work


def build_encoder(job: EncodeJob, tokenizer: Tokenizer | None = None) -> BlockEncoder | ChatEncoder:
    """Return the encoder of texts or of conversations; arguments and errors are theirs."""
    chat = job.settings.chat
    return BlockEncoder(job, tokenizer) if chat is None else ChatEncoder(job, chat, tokenizer)


def send_block(connection: Connection, block: LineBlock) -> None:
    """Send a block to a worker."""
    start, end = block.start, block.end
    header = {"file": block.file, "start": [start.line, start.offset], "end": [end.line, end.offset]}
    connection.send_bytes(orjson.dumps(header))
    connection.send_bytes(block.data)


def _send_result(connection: Connection, result: EncodedBlock) -> None:
    header: dict[str, Any] = {"bad": [[bad.line, bad.offset, bad.reason] for bad in result.bad]}
    header |= {"not_strict": result.not_strict, "accelerator": result.accelerator, "note": result.note}
    connection.send_bytes(orjson.dumps(header))
    for key in result.keys:
        connection.send_bytes(key.ids.data)
        connection.send_bytes(key.lengths.data)
        if key.counts is not None:
            connection.send_bytes(key.counts.data)


def receive_result(connection: Connection, block: LineBlock, job: EncodeJob) -> EncodedBlock:
    """Wait for the result of a block. Raises TokenizerError of the worker; EOFError or OSError if it died."""
    header = orjson.loads(connection.recv_bytes())
    if "error" in header:
        raise TokenizerError(header["error"])
    dtypes: list[Any] = [job.dtype, np.int32] + ([] if job.settings.sentences is None else [np.int32])
    keys = tuple(
        EncodedKey(*(np.frombuffer(connection.recv_bytes(), dtype) for dtype in dtypes)) for _ in job.settings.keys
    )
    bad = tuple(BadInput(block.file, line, offset, reason) for line, offset, reason in header["bad"])
    size = len(block.data)
    return EncodedBlock(block.end, keys, bad, header["not_strict"], size, header["accelerator"], header["note"])


class _Worker:
    """Worker process and its connection."""

    def __init__(self) -> None:
        self.job: EncodeJob | None = None
        self.closing = False
        self.process, self.connection = self._start()

    def _start(self) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()  # then the death of the process closes the pipe
        return process, ours

    def encode(self, block: LineBlock, job: EncodeJob) -> EncodedBlock:
        """Encode a block in the process. A process that dies is replaced once; then DataError is raised."""
        try:
            return self._exchange(block, job)
        except (EOFError, OSError):
            if self.closing:
                raise
            _log.warning("a worker %s: starting another, which repeats its block", self._exit_reason())
            self.connection.close()
            self.job = None
            self.process, self.connection = self._start()
        try:
            return self._exchange(block, job)
        except (EOFError, OSError) as error:
            raise DataError(
                f"{block.file}:{block.start.line} to line {block.end.line - 1}: a worker {self._exit_reason()} on "
                "these lines, twice. If memory ran out, lower --memory-mb or --workers; the same command resumes"
            ) from error

    def _exchange(self, block: LineBlock, job: EncodeJob) -> EncodedBlock:
        if self.job is None:
            self.connection.send(job)
            self.job = job
        send_block(self.connection, block)
        return receive_result(self.connection, block, job)

    def _exit_reason(self) -> str:
        self.process.join(timeout=5)
        code = self.process.exitcode
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"

    def stop(self) -> None:
        """End the process; a thread that waits for its result gets EOFError."""
        self.closing = True
        self.process.terminate()
        self.process.join()


class BlockPool:
    """Pool of worker processes, started as blocks come and ended by the context manager."""

    def __init__(self, workers: int, in_flight_bytes: int) -> None:
        """Make a pool without processes.

        Args:
            workers: Most processes; fewer are started if there are fewer blocks.
            in_flight_bytes: Limit of text between reading and the consumer; a longer block is processed alone.
        """
        self._workers: list[_Worker] = []
        self._most_workers = workers
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
        """Yield the result of each block in order; to be called once.

        Args:
            blocks: Blocks, read in a thread; bad inputs are passed on.
            job: Settings of encoding.

        Raises:
            Exception: An exception of the reader or of a worker, instead of the result of its block.
        """
        threading.Thread(target=self._read, args=(blocks, job), daemon=True).start()
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

    def _read(self, blocks: Iterator[LineBlock | BadInput], job: EncodeJob) -> None:
        number = 0
        try:
            for block in blocks:
                if isinstance(block, BadInput):
                    self._put(number, block)
                elif self._admit(len(block.data)):
                    self._start_worker(job)
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
        """Wait until the limit allows `size` more bytes; return False if the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._in_flight or self._in_flight + size <= self._limit)
            self._in_flight += size
            return not self._closed

    def _start_worker(self, job: EncodeJob) -> None:
        with self._changed:
            if self._closed or len(self._workers) == self._most_workers:
                return
            self._workers.append(_Worker())
        threading.Thread(target=self._feed, args=(self._workers[-1], job), daemon=True).start()

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
