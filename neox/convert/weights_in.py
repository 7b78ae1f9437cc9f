"""Reading the weights of a Hugging Face directory: safetensors or bin, one file or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from neox.checkpoint import load_file
from neox.errors import CheckpointError, ConversionError

_SAFETENSORS, _BIN = "model.safetensors", "pytorch_model.bin"
_BUFFERS = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


class HFWeights:
    """Tensors of a Hugging Face directory by key, read one at a time (memory-mapped).

    Raises ConversionError when there are no weights, a shard is missing or a file is broken.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file_of = _find_files(directory)
        self._bin: tuple[Path, Mapping[str, Tensor]] | None = None

    @cached_property
    def names(self) -> frozenset[str]:
        """Keys of all weights; tables that can be computed (masks, rotary frequencies) left out."""
        return frozenset(name for name in self._file_of if not name.endswith(_BUFFERS))

    def get(self, name: str) -> Tensor:
        """The tensor of a key, possibly a view of a mapped file."""
        path = self._file_of[name]
        if path.suffix == ".safetensors":
            from safetensors import SafetensorError, safe_open

            try:
                with safe_open(str(path), framework="pt") as opened:
                    tensor: Tensor = opened.get_tensor(name)
                    return tensor
            except (SafetensorError, OSError) as error:
                raise ConversionError(f"{path}: {name} cannot be read: {error}") from error
        if self._bin is None or self._bin[0] != path:
            self._bin = None
            self._bin = (path, _load_bin(path))
        return self._bin[1][name]


def _find_files(directory: Path) -> dict[str, Path]:
    """Key -> file."""
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
    raise ConversionError(f"{directory}: no {_SAFETENSORS}, {_BIN} or an index of shards; not a Hugging Face model")


def _keys(path: Path) -> list[str]:
    if path.suffix == ".bin":
        return list(_load_bin(path))
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path}: broken or no safetensors file: {error}") from error


def _load_bin(path: Path) -> Mapping[str, Tensor]:
    try:
        loaded = load_file(path)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error
    if not isinstance(loaded, Mapping):
        raise ConversionError(f"{path}: expected a state dict, found {type(loaded).__name__}")
    return loaded


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConversionError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConversionError(f"{path}: no such file; give a Hugging Face model's directory") from error
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{path}: expected a JSON object")
    return value
