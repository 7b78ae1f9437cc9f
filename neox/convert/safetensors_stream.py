"""Writing and reading safetensors one tensor at a time, without holding a file in memory.

The format: 8 bytes little-endian length of a JSON header, the header (name -> dtype, shape, offsets), then the raw
row-major data in the order of the header.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

_CODES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """Write a file whose tensors are known by name, shape and dtype, as blocks of rows, in their order."""

    def __init__(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        self._entries = list(entries)
        self._next = 0
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in entries:
            header[entry.name] = {
                "dtype": _CODES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [offset, offset + entry.nbytes],
            }
            offset += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._stream = open(path, "wb", buffering=0)  # noqa: SIM115  closed by __exit__
        self._write(struct.pack("<Q", len(text)) + text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: BaseException | TracebackType | None) -> None:
        if kind is None:
            os.fsync(self._stream.fileno())
            assert self._next == len(self._entries), "not every tensor was written"
        self._stream.close()

    def write(self, name: str, blocks: Iterable[Tensor]) -> None:
        """Write the next tensor from blocks of rows, cast to its dtype. Raises OSError when the disk refuses."""
        entry = self._entries[self._next]
        assert entry.name == name, (entry.name, name)
        written = 0
        for block in blocks:
            raw = block.to(entry.dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
            self._write(raw)
            written += raw.nbytes
        assert written == entry.nbytes, f"{name}: {written} bytes written, {entry.nbytes} announced"
        self._next += 1

    def _write(self, data: object) -> None:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        while view:  # an unbuffered write may be partial (2 GiB at most on Linux)
            view = view[self._stream.write(view) :]
