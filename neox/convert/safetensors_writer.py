"""Writer of safetensors files, one tensor at a time.

The format: 8 bytes little-endian length of a JSON header, the header (name -> dtype, shape, offsets), then the raw
row-major data in the order of the header.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from neox.checkpoint import WRITE_BYTES
from neox.errors import ConversionError, os_errors

_THREADS = 4
_PAGE = 4096
_CODES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """Writer of a file whose tensors are known by name, shape and dtype.

    Several threads write the blocks of one tensor (a write releases the interpreter lock), which reaches the speed of
    the page cache and the disk. Nothing is fsynced: unlike a checkpoint, an export can be repeated.
    """

    def __init__(self, path: Path, entries: Sequence[TensorEntry], *, threads: int = _THREADS) -> None:
        """Create the file and write its header.

        Args:
            path: File to create or replace.
            entries: Tensors in the order in which they will be written.
            threads: Number of threads that write.

        Raises:
            ConversionError: If the file cannot be created, or the disk has not enough space for it.
        """
        self._path = path
        self._entries = list(entries)
        self._next = 0
        header, self._end = _header(entries)
        with os_errors(ConversionError, f"{path}: cannot be written"):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            # Raises now if the disk is full, and halves the time of writing.
            os.posix_fallocate(self._descriptor, 0, self._end)
        self._pool = ThreadPoolExecutor(threads)
        self._offset = 0
        self._put(header, 0)
        self._offset = len(header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: BaseException | TracebackType | None) -> None:
        self._pool.shutdown()
        try:
            if kind is None:
                assert self._next == len(self._entries), "not every tensor was written"
                assert self._offset == self._end, (self._offset, self._end)
        finally:
            os.close(self._descriptor)

    def write(self, name: str, blocks: Iterable[Tensor]) -> None:
        """Write the next tensor.

        Args:
            name: Its name, for a check of the order.
            blocks: Its rows, in pieces; they are cast to its dtype.

        Raises:
            ConversionError: If the disk refuses.
        """
        entry = self._entries[self._next]
        assert entry.name == name, (entry.name, name)
        pending: deque[Future[None]] = deque()
        start = self._offset
        for block in blocks:
            while len(pending) >= 2 * _THREADS:  # bounds the memory of blocks that were cast or joined
                pending.popleft().result()
            nbytes = block.numel() * entry.dtype.itemsize
            pending.append(self._pool.submit(self._write_block, block, entry.dtype, self._offset))
            self._offset += nbytes
        for future in pending:
            future.result()
        assert self._offset - start == entry.nbytes, f"{name}: {self._offset - start} bytes instead of {entry.nbytes}"
        self._next += 1

    def _write_block(self, block: Tensor, dtype: torch.dtype, offset: int) -> None:
        raw = block.to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
        raw[::_PAGE].max()  # reads every page of a mapped file first, because writing pages from disk is slow
        self._put(raw, offset)

    def _put(self, data: object, offset: int) -> None:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        with os_errors(ConversionError, f"{self._path}: cannot be written"):
            while view:  # a write may be partial
                count = os.pwrite(self._descriptor, view[:WRITE_BYTES], offset)
                view = view[count:]
                offset += count


def _header(entries: Sequence[TensorEntry]) -> tuple[bytes, int]:
    """Return the file's first bytes, padded to a multiple of 8, and the size of the whole file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.nbytes
        header[entry.name] = {
            "dtype": _CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    return start, len(start) + offset
