"""Weights of a Hugging Face directory: reading them, writing them in shards, and their layouts.

A tensor at a time is in memory; tensors that are equal on both sides are copied block by block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox.architecture import Architecture, LayerPlan
from neox.checkpoint import CheckpointReader, load_file
from neox.checkpoint.reshard import VOCABULARY
from neox.convert.safetensors_writer import SafetensorsWriter, TensorEntry
from neox.errors import CheckpointError, ConfigError, ConversionError, os_errors
from neox.families import Family, TensorMapping, TensorSource
from neox.log import progress

_SAFETENSORS, _BIN = "model.safetensors", "pytorch_model.bin"
# Pages of mapped files count as used memory until the files are closed, which takes about a millisecond per file.
_MAPPED_BYTES = 32_000_000


class HFWeights:
    """Tensors of a Hugging Face directory by key: safetensors or bin, one file or shards with an index.

    Files are memory-mapped.
    """

    def __init__(self, directory: Path, family: Family) -> None:
        """Find the files. Raises ConversionError when there are none, a shard is missing or a file is broken."""
        self.directory, self.family = directory, family
        self._file_of = _find_files(directory)
        self._bin: tuple[Path, Mapping[str, Tensor]] | None = None

    @cached_property
    def keys(self) -> frozenset[str]:
        """Keys of all weights, without buffers."""
        return frozenset(key for key in self._file_of if not key.endswith(self.family.buffers))

    def find(self, key: str) -> str | None:
        """Return the key under which a tensor is stored: `key`, or one without the base model's prefix, or an alias."""
        known = self.family.key_aliases.items()
        aliases = (key.removesuffix(end) + alias for alias, end in known if key.endswith(end))
        candidates = (key, key.removeprefix(self.family.base_prefix), *aliases)
        return next((candidate for candidate in candidates if candidate in self.keys), None)

    def get(self, key: str) -> Tensor:
        """Return a stored tensor, possibly a view of a mapped file. Raises ConversionError if it cannot be read."""
        path = self._file_of[key]
        if path.suffix == ".safetensors":
            from safetensors import SafetensorError, safe_open

            try:
                with safe_open(str(path), framework="pt") as opened:
                    tensor: Tensor = opened.get_tensor(key)
                    return tensor
            except (SafetensorError, OSError) as error:
                raise ConversionError(f"{path}: {key} cannot be read: {error}") from error
        if self._bin is None or self._bin[0] != path:
            self._bin = None  # closes the file before the next one is mapped
            self._bin = (path, _load_bin(path))
        return self._bin[1][key]


def _find_files(directory: Path) -> dict[str, Path]:
    """Return key -> file."""
    for single in (_SAFETENSORS, _BIN):
        index = directory / f"{single}.index.json"
        if index.is_file():
            weight_map: dict[str, str] = read_json(index).get("weight_map", {})
            found = {name: directory / file for name, file in weight_map.items()}
            if missing := sorted({str(path) for path in found.values() if not path.is_file()}):
                raise ConversionError(f"{index} names files that are missing: {', '.join(missing)}")
            return found
        if (directory / single).is_file():
            return dict.fromkeys(_keys(directory / single), directory / single)
    raise ConversionError(
        f"{directory}: contains no {_SAFETENSORS}, {_BIN} or index of shards, so it is no Hugging Face model"
    )


def _keys(path: Path) -> list[str]:
    if path.suffix == ".bin":
        return list(_load_bin(path))
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path}: broken, or not a safetensors file: {error}") from error


def _load_bin(path: Path) -> Mapping[str, Tensor]:
    try:
        loaded = load_file(path)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error
    if not isinstance(loaded, Mapping):
        raise ConversionError(f"{path}: expected a state dict, found {type(loaded).__name__}")
    return loaded


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError if there is no such file, and ConversionError for what is no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; give the directory of a Hugging Face model") from error
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def to_hf_layout(tensor: Tensor, source: TensorSource, architecture: Architecture) -> list[Tensor]:
    """Return the Hugging Face tensors that a parameter is made of, one per module of `source`."""
    count, heads, width = len(source.modules), architecture.num_attention_heads, architecture.head_dim
    parts = list(tensor.tensor_split(count))
    if source.layout == "heads":
        rest = tensor.shape[1:]
        if architecture.num_kv_heads == heads:  # rows [heads, 3, head_dim] here
            tensor = tensor.reshape(heads, 3, width, *rest).transpose(0, 1).reshape(-1, *rest)
        queries, keys, values = tensor.split(_head_rows(architecture))
        if source.interleaved:
            queries, keys = (_pairs(part, architecture, neighbours=True) for part in (queries, keys))
        parts = [queries, keys, values] if count == 3 else [torch.cat([queries, keys, values])]
    return [part.T.contiguous() if source.transpose and part.dim() == 2 else part for part in parts]


def from_hf_layout(tensors: Sequence[Tensor], source: TensorSource, architecture: Architecture) -> Tensor:
    """Return a parameter, full and unsplit, from its Hugging Face tensors: the inverse of `to_hf_layout`."""
    parts = [tensor.T if source.transpose and tensor.dim() == 2 else tensor for tensor in tensors]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    if source.layout == "heads":
        if source.interleaved:
            queries, keys, values = tensor.split(_head_rows(architecture))
            queries, keys = (_pairs(part, architecture, neighbours=False) for part in (queries, keys))
            tensor = torch.cat([queries, keys, values])
        if architecture.num_kv_heads == architecture.num_attention_heads:
            heads, rest = architecture.num_attention_heads, tensor.shape[1:]
            tensor = tensor.reshape(3, heads, -1, *rest).transpose(0, 1).reshape(tensor.shape)
    return tensor.contiguous()


def _head_rows(architecture: Architecture) -> list[int]:
    """Return the rows of all queries, keys and values."""
    kv = architecture.num_kv_heads * architecture.head_dim
    return [architecture.num_attention_heads * architecture.head_dim, kv, kv]


def _pairs(rows: Tensor, architecture: Architecture, *, neighbours: bool) -> Tensor:
    """Reorder the rotated rows of each head: rotary pairs (i, i + n/2) become neighbours, or the reverse."""
    rotated, width, rest = architecture.rotary_ndims, architecture.head_dim, rows.shape[1:]
    order = torch.arange(rotated).reshape((2, -1) if neighbours else (-1, 2)).T.flatten()
    order = torch.cat([order, torch.arange(rotated, width)]).to(rows.device)
    return rows.reshape(-1, width, *rest).index_select(1, order).reshape(rows.shape)


@dataclass(frozen=True)
class PlannedTensor:
    """A Hugging Face tensor to be written: part number `part` of a parameter."""

    mapping: TensorMapping
    part: int
    entry: TensorEntry


@dataclass(frozen=True)
class Export:
    """Weights that were written.

    Attributes:
        total_bytes: Bytes of all tensors.
        tensors: Number of tensors.
        files: Number of files.
        dtype: Most frequent dtype.
    """

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
        family: Target.
        dtype: None keeps each tensor's own.
        vocab_rows: Rows kept of the embedding and the head.

    Raises:
        ConversionError: If a stored shape is not the model's.
    """
    planned = []
    for mapping in family.mappings(layers):
        spec, stored = reader.spec(mapping.layer, mapping.name), reader.shape(mapping.layer, mapping.name)
        if stored != spec.shape:
            raise ConversionError(
                f"{reader.path}: layer {mapping.layer} {mapping.name} has shape {list(stored)}, the config's model "
                f"has {list(spec.shape)}; is this the checkpoint's config?"
            )
        if mapping.name in VOCABULARY:
            stored = (min(vocab_rows, stored[0]), *stored[1:])
        target = dtype or reader.parts(mapping.layer, mapping.name)[0].dtype
        shapes = [stored]
        if not mapping.is_copy:
            parts = to_hf_layout(torch.empty(stored, device="meta"), mapping.source, layers.architecture)
            shapes = [tuple(part.shape) for part in parts]
        for part, (key, shape) in enumerate(zip(mapping.keys, shapes, strict=True)):
            planned.append(PlannedTensor(mapping, part, TensorEntry(key, shape, target)))
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
        output: Directory.
        max_shard_bytes: Largest file (of more than one tensor).

    Raises:
        ConversionError: For values that the target dtype cannot hold, or if the disk refuses.
    """
    shards = _shards(planned, max_shard_bytes)
    total = sum(item.entry.nbytes for item in planned)
    weight_map: dict[str, str] = {}
    with progress("export", total, unit="B") as bar:
        for number, shard in enumerate(shards, 1):
            name = _SAFETENSORS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            with SafetensorsWriter(output / name, [item.entry for item in shard]) as writer:
                mapped = 0
                for item in shard:
                    if mapped + item.entry.nbytes > _MAPPED_BYTES:
                        reader.release()
                        mapped = 0
                    mapped += item.entry.nbytes
                    writer.write(item.entry.name, _blocks(reader, layers.architecture, item))
                    weight_map[item.entry.name] = name
                    bar.update(item.entry.nbytes)
    if len(shards) > 1:
        write_json(output / f"{_SAFETENSORS}.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    dtypes = [item.entry.dtype for item in planned]
    return Export(total, len(planned), len(shards), max(set(dtypes), key=dtypes.count))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an indented JSON object. Raises ConversionError if the disk refuses."""
    with os_errors(ConversionError, f"{path}: cannot be written"):
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _shards(planned: list[PlannedTensor], max_bytes: int) -> list[list[PlannedTensor]]:
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


def _blocks(reader: CheckpointReader, architecture: Architecture, item: PlannedTensor) -> Iterator[Tensor]:
    """Yield blocks of rows of one tensor, cut to the entry's rows."""
    mapping, entry = item.mapping, item.entry
    blocks: Iterator[Tensor]
    if mapping.is_copy:
        blocks = iter(reader.row_blocks(mapping.layer, mapping.name))
    else:
        full = reader.full(mapping.layer, mapping.name)
        blocks = iter([to_hf_layout(full, mapping.source, architecture)[item.part]])
    left = entry.shape[0]
    for block in blocks:
        rows = block[:left]
        if entry.dtype == torch.float16 and rows.dtype != torch.float16 and _overflows(rows):
            raise ConversionError(
                f"{reader.path}: layer {mapping.layer} {mapping.name} has values beyond fp16's 65504; "
                "export with --precision bf16 or fp32"
            )
        left -= rows.shape[0]
        yield rows
        if left == 0:
            return
    assert left == 0, entry


def _overflows(rows: Tensor) -> bool:
    return bool((rows.abs() > torch.finfo(torch.float16).max).any())
