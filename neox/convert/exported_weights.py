"""Export of a checkpoint's weights as safetensors files, one tensor at a time.

Tensors that are equal on both sides are copied block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from neox.architecture import VOCABULARY, Architecture, LayerPlan
from neox.checkpoint import CheckpointReader
from neox.convert.hf_directory import INDEX_ENDING, SAFETENSORS, write_json
from neox.convert.layouts import to_hf_layout
from neox.convert.safetensors_writer import SafetensorsWriter, TensorEntry
from neox.errors import ConversionError
from neox.families import Family, TensorMapping
from neox.log import Progress, progress

_MAPPED_BYTES = 32_000_000
"""Bytes that are read before files are closed.

Pages of mapped files count as used memory until then. Closing takes about a millisecond for each file.
"""


@dataclass(frozen=True)
class PlannedTensor:
    """A Hugging Face tensor to be written: one part of a parameter.

    Attributes:
        mapping: The parameter.
        part: Number of the part, which is that of its key in `mapping.keys`.
        entry: Its name, shape and dtype in the file.
    """

    mapping: TensorMapping
    part: int
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
        dtype: Dtype of all tensors but those that stay fp32; None keeps each tensor's own.
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
        parts = to_hf_layout(torch.empty(stored, device="meta"), mapping.source, layers.architecture)
        for number, (key, part) in enumerate(zip(mapping.keys, parts, strict=True)):
            planned.append(PlannedTensor(mapping, number, TensorEntry(key, tuple(part.shape), target)))
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
    shards = _shards(planned, max_shard_bytes)
    weight_map: dict[str, str] = {}
    with progress("export", total_bytes, unit="B") as bar:
        for number, shard in enumerate(shards, 1):
            name = SAFETENSORS
            if len(shards) > 1:
                name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_shard(reader, layers.architecture, shard, output / name, bar)
            weight_map.update((item.entry.name, name) for item in shard)
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


def _shards(planned: list[PlannedTensor], max_bytes: int) -> list[list[PlannedTensor]]:
    """Divide tensors, in their order, into files."""
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for item in planned:
        nbytes = item.entry.nbytes
        if shards[-1] and size + nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += nbytes
    return shards


def _write_shard(
    reader: CheckpointReader, architecture: Architecture, shard: list[PlannedTensor], path: Path, bar: Progress
) -> None:
    """Write one file, and count its bytes in the progress bar."""
    mapped = 0
    with SafetensorsWriter(path, [item.entry for item in shard]) as writer:
        for item in shard:
            if mapped + item.entry.nbytes > _MAPPED_BYTES:
                reader.release()
                mapped = 0
            mapped += item.entry.nbytes
            writer.write(item.entry.name, _blocks(reader, architecture, item))
            bar.update(item.entry.nbytes)


def _blocks(reader: CheckpointReader, architecture: Architecture, item: PlannedTensor) -> Iterator[Tensor]:
    """Yield blocks of rows of one tensor, as many rows as its entry has."""
    mapping = item.mapping
    if mapping.is_copy:
        blocks = reader.row_blocks(mapping.layer, mapping.name)
    elif mapping.source.layout == "experts":
        modules = len(mapping.source.modules)
        expert, module = divmod(item.part, modules)
        weight = reader.expert(mapping.layer, mapping.name, expert)
        blocks = iter([weight.tensor_split(modules)[module]])
    else:
        full = reader.full(mapping.layer, mapping.name)
        blocks = iter([to_hf_layout(full, mapping.source, architecture)[item.part]])
    rows_left = item.entry.shape[0]
    for block in blocks:
        rows = block[:rows_left]
        if item.entry.dtype == torch.float16 and rows.dtype != torch.float16 and _overflows(rows):
            raise ConversionError(
                f"{reader.path}: layer {mapping.layer} {mapping.name} has values beyond fp16's 65504; "
                "export with --precision bf16 or fp32"
            )
        rows_left -= rows.shape[0]
        yield rows
        if rows_left == 0:
            return
    assert rows_left == 0, item.entry


def _overflows(rows: Tensor) -> bool:
    """Return whether fp16 cannot hold a value."""
    return bool((rows.abs() > torch.finfo(torch.float16).max).any())
