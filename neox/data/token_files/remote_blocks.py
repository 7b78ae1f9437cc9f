"""Ids of token files in object storage, read through a bounded cache of blocks that the ranks of a host share.

DATA_CACHE_DIR/1a2b3c/t.idx, t.json             whole
DATA_CACHE_DIR/1a2b3c/t.remote.json             where the ids are, and how much disk a host may take
DATA_BLOCK_DIR/1a2b3c-4d5e6f/HOST/blocks        as long as the `.bin`; blocks that are not here are holes
                                  state         when each block was read last, and its checksum (mapped by all ranks)
                                  locks/        one rank fetches a block, and none reads while blocks are dropped

A block is on disk before the state says that it is here, so that a killed process leaves no half of one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from neox.data.token_files.crc import CrcJoiner
from neox.errors import DataError, os_errors
from neox.files import lock_file, lock_file_shared
from neox.log import get_logger
from neox.storage import RemoteIds, attempt, filesystem, shown

_log = get_logger(__name__)
BLOCK_BYTES = 1 << 20
_STATE = np.dtype([("read", "<i8"), ("crc32", "<u4"), ("known", "<u4")])
_THREADS = 8
_LOCKS = 64
_ROUNDS = 4
_CALLS_OF_LOOK = 64
_ALMOST = 0.9
_KEEP_SIZE = 1
_PUNCH_HOLE = 2
_DROPPED_AT_ONCE = 64  # parts of the limit that are dropped together, so that readers seldom wait


class BlockFile:
    """Bytes of a file in object storage, fetched by blocks when they are first read.

    Args:
        ids: Description of the file.

    Raises:
        DataError: If the directory cannot be written, or its file system cannot drop blocks.
    """

    def __init__(self, ids: RemoteIds) -> None:
        self.ids = ids
        self._count = -(-ids.size // BLOCK_BYTES)
        self._drops = ids.limit < ids.size
        self._most = max(1, ids.limit // BLOCK_BYTES)
        self._is_whole = False
        self._calls = -1
        self._finishing: threading.Thread | None = None
        folder = Path(ids.directory, socket.gethostname())
        self._locks = folder / "locks"
        with os_errors(DataError, f"data_block_dir: {folder} cannot be written"):
            self._locks.mkdir(parents=True, exist_ok=True)
            _remove_other_versions(Path(ids.directory))
            self._blocks = _sized(folder / "blocks", ids.size)
            state = _sized(folder / "state", self._count * _STATE.itemsize)
        os.close(state)
        self._state = np.memmap(folder / "state", dtype=_STATE, mode="r+")
        self._read = self._state["read"]
        self.bytes = np.memmap(folder / "blocks", dtype=np.uint8, mode="r")
        if self._drops:
            self._check_holes(folder)

    @property
    def stored_bytes(self) -> int:
        """Most bytes of the blocks that are here."""
        return int(np.count_nonzero(self._read)) * BLOCK_BYTES

    def is_whole(self) -> bool:
        """Return whether all blocks are permanently on this host, so that `bytes` is like a local file.

        The state is only checked every few calls. When only a tenth of the blocks is missing, a thread fetches them,
        because no rank might ever read the documents in the last blocks.
        """
        if self._drops or self._is_whole:
            return self._is_whole
        self._calls += 1
        if self._calls % _CALLS_OF_LOOK == 0:
            here = np.count_nonzero(self._read)
            self._is_whole = here == self._count
            if self._finishing is None and here >= _ALMOST * self._count:
                self._finishing = threading.Thread(target=self._fetch_rest, daemon=True, name="last-blocks")
                self._finishing.start()
        return self._is_whole

    def _fetch_rest(self) -> None:
        try:
            self._fetch(np.arange(self._count))
        except DataError as error:
            _log.warning("%s", error)  # a reader that needs a block reports it

    @contextmanager
    def reading(self, begins: np.ndarray, ends: np.ndarray) -> Iterator[None]:
        """Hold pieces of the file in `bytes` during the block.

        Args:
            begins: First byte of each piece.
            ends: Byte after the last one of each piece, at least one after the first.

        Raises:
            DataError: If blocks cannot be fetched.
        """
        first = begins // BLOCK_BYTES
        last = (ends - 1) // BLOCK_BYTES
        blocks = np.concatenate([first, last])
        if (last - first).max(initial=0) > 1:
            ranges = [np.arange(start, stop + 1) for start, stop in zip(first, last, strict=True)]
            blocks = np.unique(np.concatenate(ranges))
        if not self._drops:
            if not self._read[blocks].all():
                self._fetch(np.unique(blocks))
            yield
            return
        for _ in range(_ROUNDS):
            if not self._read[blocks].all():
                self._fetch(np.unique(blocks))
                self._drop_oldest()
            with open(self._locks / "drop", "a") as lock:
                lock_file_shared(lock)
                if self._read[blocks].all():  # else dropped meanwhile
                    self._read[blocks] = time.time_ns()
                    yield
                    return
        with open(self._locks / "drop", "a") as lock:
            lock_file(lock, wait=True)  # nothing is dropped meanwhile, although the limit is too small for these pieces
            self._fetch(np.unique(blocks))
            yield
        self._drop_oldest()

    def _fetch(self, blocks: np.ndarray) -> None:
        """Fetch those of some blocks that are not here, several at a time."""
        missing = [int(block) for block in blocks if not self._read[block]]
        if len(missing) == 1:
            self._fetch_block(missing[0])
        elif missing:
            with ThreadPoolExecutor(_THREADS) as pool:
                for _ in pool.map(self._fetch_block, missing):
                    pass
        if missing and self.ids.crc32 is not None:
            self._check_whole()

    def _fetch_block(self, block: int) -> None:
        cannot = os_errors(DataError, f"data_block_dir: {self._locks.parent} cannot be written")
        with cannot, open(self._locks / str(block % _LOCKS), "a") as lock:
            lock_file(lock, wait=True)
            if self._read[block]:
                return
            data = self._download(block)
            crc = zlib.crc32(data)
            entry = self._state[block]
            if entry["known"] and entry["crc32"] != crc:
                raise DataError(
                    f"{shown(self.ids.address)}: byte {block * BLOCK_BYTES:,} and what follows is not what it was "
                    "before: the file was replaced while it was read. Give the command again"
                )
            _write_all(self._blocks, data, block * BLOCK_BYTES)
            os.fdatasync(self._blocks)
            self._state["crc32"][block] = crc
            self._state["known"][block] = 1
            self._read[block] = time.time_ns()

    def _download(self, block: int) -> bytes:
        start = block * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, self.ids.size)
        where = filesystem(self.ids.address)

        def read() -> bytes:
            data: bytes = where.cat_file(self.ids.address, start=start, end=end)
            if len(data) != end - start:
                raise OSError(f"{len(data):,} bytes came instead of {end - start:,} at byte {start:,}")
            return data

        return attempt(read, shown(self.ids.address))

    def _drop_oldest(self) -> None:
        """Drop the blocks that were read longest ago, if more are here than may be."""
        if np.count_nonzero(self._read) <= self._most:
            return
        with open(self._locks / "drop", "a") as lock:
            lock_file(lock, wait=True)
            here = np.flatnonzero(self._read)
            excess = len(here) - self._most
            if excess <= 0:
                return
            count = min(len(here) - 1, excess + self._most // _DROPPED_AT_ONCE)
            oldest = here[np.argpartition(self._read[here], count - 1)[:count]]
            self._read[oldest] = 0
            self._state.flush()  # before their bytes go
            for block in oldest:
                _punch(self._blocks, int(block) * BLOCK_BYTES, BLOCK_BYTES)

    def _check_whole(self) -> None:
        """Compare the checksum of the whole file as soon as every block has been here. Raises DataError."""
        if not self._state["known"].all():
            return
        done = self._locks / "whole"
        if done.exists():
            return
        joiner = CrcJoiner(BLOCK_BYTES)
        last = self.ids.size - (self._count - 1) * BLOCK_BYTES
        found = joiner.join(self._state["crc32"][:-1].tolist(), int(self._state["crc32"][-1]), last)
        if found != self.ids.crc32:
            self._state[:] = 0  # the next start fetches everything again
            raise DataError(
                f"{shown(self.ids.address)}: its checksum is {found:08x}, and its .json says {self.ids.crc32:08x}: "
                "what is there is damaged, or another file. Upload both files again, and give the command again"
            )
        done.touch()
        _log.info("%s: every block has been read; the checksum is that of its .json", shown(self.ids.address))

    def _check_holes(self, folder: Path) -> None:
        """Raise DataError if this file system cannot drop blocks out of a file."""
        try:
            with open(folder / "probe", "w+b") as file:
                file.write(b"x")
                file.flush()
                _punch(file.fileno(), 0, 1)
        except OSError as error:
            raise DataError(
                f"data_block_dir: the file system of {folder} cannot drop parts of files ({error.strerror}); give a "
                "directory on a local disk, or leave out data_cache_gb to copy whole files"
            ) from error


class RemoteTokens:
    """Ids of a `.bin` in object storage, which are sliced like an array.

    Args:
        ids: Description of the file.
        dtype: Dtype of the ids.
    """

    def __init__(self, ids: RemoteIds, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.file = BlockFile(ids)
        self._tokens = np.asarray(self.file.bytes).view(dtype)  # slices of a memmap cost several times as much

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self._tokens)

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return a copy of a slice without a step. Raises DataError if its blocks cannot be fetched."""
        begin, end, _ = part.indices(len(self))
        if end <= begin:
            return np.empty(0, self.dtype)
        return self.joined([begin], [end])

    def joined(self, begins: Sequence[int], ends: Sequence[int]) -> np.ndarray:
        """Return copies of pieces, one after another. Raises DataError if their blocks cannot be fetched.

        Args:
            begins: First id of each piece.
            ends: Id after the last one of each piece.
        """
        tokens = self._tokens
        if self.file.is_whole():
            return np.concatenate([tokens[begin:end] for begin, end in zip(begins, ends, strict=True)])
        width = self.dtype.itemsize
        first = np.asarray(begins, dtype=np.int64) * width
        last = np.asarray(ends, dtype=np.int64) * width
        filled = last > first
        if not filled.all():
            first = first[filled]
            last = last[filled]
        with self.file.reading(first, last):
            return np.concatenate([tokens[begin:end] for begin, end in zip(begins, ends, strict=True)])


def _remove_other_versions(directory: Path) -> None:
    """Remove the blocks of what was at the address before; the name begins with the address's hash."""
    address = directory.name.partition("-")[0]
    for other in directory.parent.glob(f"{address}-*"):
        if other.name != directory.name:
            shutil.rmtree(other, ignore_errors=True)


def _sized(path: Path, size: int) -> int:
    """Open a file for reading and writing, of `size` bytes; it begins as a hole."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    if os.fstat(descriptor).st_size != size:
        os.ftruncate(descriptor, size)
    return descriptor


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def _punch(descriptor: int, offset: int, length: int) -> None:
    """Give the disk space of a part of a file back. Raises OSError."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
