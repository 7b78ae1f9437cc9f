"""Export of a checkpoint's weights as safetensors files, one tensor at a time.

    plan_tensors     each parameter -> its Hugging Face tensors (`Family.mappings`): name, shape, dtype
         v
    write_weights    tensors -> files of at most `max_shard_bytes`, and their index
         |  _blocks          rows of one tensor: copied block by block where both sides hold the same, or else
         |                   `to_hf_layout` of the whole parameter; of a stack of experts, one expert
         v
    SafetensorsWriter        threads cast the blocks and write them at their places

A safetensors file is 8 bytes with the little-endian length of a JSON header, the header (name -> dtype, shape,
offsets), and the raw row-major data in the order of the header.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from neox.architecture import VOCABULARY, Architecture, LayerPlan
from neox.checkpoint import WRITE_BYTES, CheckpointReader
from neox.convert.hf_directory import INDEX_ENDING, SAFETENSORS, write_json
from neox.convert.layouts import to_hf_layout
from neox.errors import ConversionError, os_errors
from neox.families import Family, TensorMapping
from neox.log import progress

_THREADS = 4
_PAGE = 4096
_CODES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
"""Dtype -> its name in the header."""
_MAPPED_BYTES = 32_000_000
"""Bytes that are read before files are closed.

Pages of mapped files count as used memory until then. Closing takes about a millisecond for each file.
"""


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


@dataclass(frozen=True)
class PlannedTensor:
    """A Hugging Face tensor to be written, one of those that a parameter becomes.

    Attributes:
        mapping: The parameter.
        number: Its place among them, which is that of its key in `mapping.keys`.
        entry: Its name, shape and dtype in the file.
    """

    mapping: TensorMapping
    number: int
    entry: TensorEntry


@dataclass(frozen=True)
class Export:
    """Weights that were written.

    Attributes:
        parameters: Number of elements of all tensors.
        total_bytes: Bytes of all tensors.
        tensors: Number of tensors.
        files: Number of files.
        dtype: Most frequent dtype.
    """

    parameters: int
    total_bytes: int
    tensors: int
    files: int
    dtype: torch.dtype


def plan_tensors(
    reader: CheckpointReader, layers: LayerPlan, family: Family, dtype: torch.dtype | None, vocab_rows: int
) -> list[PlannedTensor]:
    """List every tensor to write, with its final shape and dtype.

    Args:
        reader: Checkpoint, opened with `layers`.
        layers: Layers of the model.
        family: Family of the export.
        dtype: Dtype of all tensors; those that stay fp32 are not rounded to it. None keeps each tensor's own.
        vocab_rows: Number of rows kept of the embedding and the head.

    Raises:
        ConversionError: If a stored shape is not the model's.
    """
    planned: list[PlannedTensor] = []
    for mapping in (*family.mappings(layers), *family.copies(layers)):
        stored = reader.shape(mapping.layer, mapping.name)
        spec = reader.spec(mapping.layer, mapping.name)
        if stored != spec.shape:
            raise ConversionError(
                f"{reader.path}: layer {mapping.layer} {mapping.name} has shape {list(stored)}, the config's model "
                f"has {list(spec.shape)}; is this the checkpoint's config?"
            )
        if mapping.name in VOCABULARY:
            stored = (min(vocab_rows, stored[0]), *stored[1:])
        target = dtype
        if target is None or spec.stays_fp32:
            target = reader.parts(mapping.layer, mapping.name)[0].dtype
            if dtype is not None:
                target = torch.promote_types(target, dtype)  # of older checkpoints: 16 bits, maybe other ones
        theirs = to_hf_layout(torch.empty(stored, device="meta"), mapping.source, layers.architecture)
        for number, (key, tensor) in enumerate(zip(mapping.keys, theirs, strict=True)):
            planned.append(PlannedTensor(mapping, number, TensorEntry(key, tuple(tensor.shape), target)))
    reader.release()
    return planned


def write_weights(
    reader: CheckpointReader,
    layers: LayerPlan,
    planned: list[PlannedTensor],
    output: Path,
    *,
    max_shard_bytes: int,
) -> Export:
    """Write planned tensors as safetensors, with an index if there are several files.

    Args:
        reader: Checkpoint, opened with `layers`.
        layers: Layers of the model.
        planned: Result of `plan_tensors`.
        output: Directory of the files.
        max_shard_bytes: Largest size of a file that holds more than one tensor.

    Raises:
        ConversionError: For values that the target dtype cannot hold, or if the disk refuses.
    """
    entries = [item.entry for item in planned]
    total_bytes = sum(entry.nbytes for entry in entries)

    # Tensors go into files in their order. A file ends before the tensor that would make it too large.
    shards: list[list[PlannedTensor]] = [[]]
    shard_bytes = 0
    for item in planned:
        if shards[-1] and shard_bytes + item.entry.nbytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(item)
        shard_bytes += item.entry.nbytes

    weight_map: dict[str, str] = {}
    with progress("export", total_bytes, unit="B") as bar:
        for number, shard in enumerate(shards, 1):
            name = SAFETENSORS
            if len(shards) > 1:
                name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            mapped = 0
            with SafetensorsWriter(output / name, [item.entry for item in shard]) as writer:
                for item in shard:
                    if mapped + item.entry.nbytes > _MAPPED_BYTES:
                        reader.release()
                        mapped = 0
                    mapped += item.entry.nbytes
                    writer.write(item.entry.name, _blocks(reader, layers.architecture, item))
                    weight_map[item.entry.name] = name
                    bar.update(item.entry.nbytes)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(output / f"{SAFETENSORS}{INDEX_ENDING}", index)
    dtypes = [entry.dtype for entry in entries]
    return Export(
        parameters=sum(prod(entry.shape) for entry in entries),
        total_bytes=total_bytes,
        tensors=len(entries),
        files=len(shards),
        dtype=max(set(dtypes), key=dtypes.count),
    )


def _blocks(reader: CheckpointReader, architecture: Architecture, item: PlannedTensor) -> Iterator[Tensor]:
    """Yield blocks of rows of one tensor, as many rows as its entry has."""
    mapping = item.mapping
    if mapping.is_copy:
        blocks = reader.row_blocks(mapping.layer, mapping.name)
    elif mapping.source.layout == "experts":
        modules = len(mapping.source.modules)
        expert, module = divmod(item.number, modules)
        weight = reader.expert(mapping.layer, mapping.name, expert)
        blocks = iter([weight.tensor_split(modules)[module]])
    else:
        full = reader.full(mapping.layer, mapping.name)
        blocks = iter([to_hf_layout(full, mapping.source, architecture)[item.number]])
    rows_left = item.entry.shape[0]
    for block in blocks:
        rows = block[:rows_left]
        narrows = item.entry.dtype == torch.float16 and rows.dtype != torch.float16
        if narrows and (rows.abs() > torch.finfo(torch.float16).max).any():
            raise ConversionError(
                f"{reader.path}: layer {mapping.layer} {mapping.name} has values beyond fp16's 65504; "
                "export with --precision bf16 or fp32"
            )
        rows_left -= rows.shape[0]
        yield rows
        if rows_left == 0:
            return
    assert rows_left == 0, item.entry


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

        # 8 bytes with the length of the JSON, and the JSON, padded to a multiple of 8.
        described: dict[str, object] = {"__metadata__": {"format": "pt"}}
        size = 0
        for entry in entries:
            described[entry.name] = {
                "dtype": _CODES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [size, size + entry.nbytes],
            }
            size += entry.nbytes
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        self._end = len(header) + size
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
