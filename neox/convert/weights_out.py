"""Writing a checkpoint's weights as safetensors: one block of rows at a time, in shards with an index beyond a size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from neox.architecture import LayerPlan
from neox.checkpoint import CheckpointReader
from neox.convert.name_table import NamePair, name_pairs
from neox.convert.safetensors_stream import SafetensorsWriter, TensorEntry
from neox.errors import ConversionError
from neox.log import progress

# Pages of mapped files count as memory used until the files are closed, which costs about a millisecond each.
_TOUCHED = 32_000_000
INDEX = "model.safetensors.index.json"
_VOCABULARY_LAYERS = ("embedding", "head")


@dataclass(frozen=True)
class Export:
    """What was written: bytes of tensors, number of tensors and of files, and the dtype of the weights."""

    total_bytes: int
    tensors: int
    files: int
    dtype: torch.dtype


def plan_tensors(
    reader: CheckpointReader, layers: LayerPlan, dtype: torch.dtype | None, vocab_rows: int | None
) -> list[tuple[NamePair, TensorEntry]]:
    """Every tensor to write, with its final shape and dtype.

    dtype: None keeps each tensor's own. vocab_rows: rows kept of the embedding and the head; None keeps all.
    Raises CheckpointError where a shape is not the model's.
    """
    planned = []
    for pair in name_pairs(layers):
        spec, stored = reader.spec(pair.layer, pair.name), reader.shape(pair.layer, pair.name)
        if stored != spec.shape:
            raise ConversionError(
                f"{reader.path}: layer {pair.layer} {pair.name} has shape {list(stored)}, "
                f"the config's model has {list(spec.shape)}; is this the checkpoint's config?"
            )
        if vocab_rows is not None and layers[pair.layer].kind in _VOCABULARY_LAYERS:
            stored = (min(vocab_rows, stored[0]), *stored[1:])
        planned.append((pair, TensorEntry(pair.hf, stored, dtype or reader.parts(pair.layer, pair.name)[0].dtype)))
    reader.release()
    return planned


def write_weights(
    reader: CheckpointReader,
    planned: list[tuple[NamePair, TensorEntry]],
    output: Path,
    *,
    max_shard_bytes: int,
) -> Export:
    """Write the planned tensors in shards of at most `max_shard_bytes` (one tensor at least). Raises OSError."""
    shards = _shards(planned, max_shard_bytes)
    total = sum(entry.nbytes for _, entry in planned)
    weight_map: dict[str, str] = {}
    with progress("export", total, unit="B") as bar:
        for number, shard in enumerate(shards, 1):
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            with SafetensorsWriter(output / name, [entry for _, entry in shard]) as writer:
                touched = 0
                for pair, entry in shard:
                    if touched + entry.nbytes > _TOUCHED:
                        reader.release()
                        touched = 0
                    touched += entry.nbytes
                    writer.write(entry.name, _blocks(reader, pair, entry))
                    weight_map[entry.name] = name
                    bar.update(entry.nbytes)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (output / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    dtypes = [entry.dtype for _, entry in planned]
    return Export(total, len(planned), len(shards), max(set(dtypes), key=dtypes.count))


def _shards(planned: list[tuple[NamePair, TensorEntry]], max_bytes: int) -> list[list[tuple[NamePair, TensorEntry]]]:
    shards: list[list[tuple[NamePair, TensorEntry]]] = [[]]
    size = 0
    for item in planned:
        nbytes = item[1].nbytes
        if shards[-1] and size + nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += nbytes
    return shards


def _blocks(reader: CheckpointReader, pair: NamePair, entry: TensorEntry) -> Iterator[Tensor]:
    """Blocks of rows of one parameter, cut to the entry's rows; values that fp16 cannot hold are an error."""
    left = entry.shape[0]
    for block in reader.row_blocks(pair.layer, pair.name):
        rows = block[:left]
        if entry.dtype == torch.float16 and rows.dtype != torch.float16 and _overflows(rows):
            raise ConversionError(
                f"{reader.path}: layer {pair.layer} {pair.name} has values beyond fp16's 65504; "
                "export with --precision bf16 or fp32"
            )
        left -= rows.shape[0]
        yield rows
        if left == 0:
            return
    assert left == 0, (entry.name, prod(entry.shape))


def _overflows(rows: Tensor) -> bool:
    return bool((rows.abs() > torch.finfo(torch.float16).max).any())
