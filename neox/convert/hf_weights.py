"""Reading of the weights in a Hugging Face directory, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from torch import Tensor

from neox.checkpoint import load_file
from neox.convert.hf_directory import BIN, INDEX_ENDING, SAFETENSORS, read_json
from neox.errors import CheckpointError, ConversionError
from neox.families import Family


class HFWeights:
    """Tensors of a Hugging Face directory by key: safetensors or bin, one file or shards with an index.

    Files are memory-mapped.

    Args:
        directory: The directory.
        family: Family of the model, which knows other names of the same tensors.

    Raises:
        ConversionError: If there are no files, a shard is missing or a file is broken.
    """

    def __init__(self, directory: Path, family: Family) -> None:
        self.directory = directory
        self.family = family
        self._file_of = _find_files(directory)
        self._open_bin: tuple[Path, Mapping[str, Tensor]] | None = None

    @property
    def files(self) -> set[Path]:
        """The files that hold the tensors."""
        return set(self._file_of.values())

    @cached_property
    def keys(self) -> frozenset[str]:
        """Keys of all weights, without buffers."""
        return frozenset(key for key in self._file_of if not key.endswith(self.family.buffers))

    def find(self, key: str) -> str | None:
        """Return the key under which a tensor is stored.

        That is the key itself, or the key without the base model's prefix, or an alias. None if it is not stored.
        """
        candidates = [key, key.removeprefix(self.family.base_prefix)]
        for alias, ending in self.family.key_aliases.items():
            if key.endswith(ending):
                candidates.append(key.removesuffix(ending) + alias)
        for candidate in candidates:
            if candidate in self.keys:
                return candidate
        return None

    def get(self, key: str) -> Tensor:
        """Return a stored tensor, possibly a view of a mapped file. Raises ConversionError if it cannot be read."""
        path = self._file_of[key]
        if path.suffix == ".safetensors":
            return _read_safetensor(path, key)
        if self._open_bin is None or self._open_bin[0] != path:
            self._open_bin = None  # closes the file before the next one is mapped
            self._open_bin = (path, _load_bin(path))
        return self._open_bin[1][key]


def _find_files(directory: Path) -> dict[str, Path]:
    """Return the file of each key. Raises ConversionError if there are none or one is missing."""
    for name in (SAFETENSORS, BIN):
        single = directory / name
        index = directory / f"{name}{INDEX_ENDING}"
        if index.is_file():
            return _files_of_index(index)
        if single.is_file():
            return dict.fromkeys(_keys_of(single), single)
    raise ConversionError(
        f"{directory}: contains no {SAFETENSORS}, {BIN} or index of shards, so it is no Hugging Face model"
    )


def _files_of_index(index: Path) -> dict[str, Path]:
    """Return the file of each key that an index of shards names. Raises ConversionError if one is missing."""
    files: dict[str, Path] = {}
    missing: set[str] = set()
    for key, name in read_json(index).get("weight_map", {}).items():
        files[key] = index.parent / name
        if not files[key].is_file():
            missing.add(str(files[key]))
    if missing:
        raise ConversionError(f"{index} names files that are missing: {', '.join(sorted(missing))}")
    return files


def _keys_of(path: Path) -> list[str]:
    """Return the keys of one file. Raises ConversionError if it is broken."""
    if path.suffix == ".bin":
        return list(_load_bin(path))
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path}: broken, or not a safetensors file: {error}") from error


def _read_safetensor(path: Path, key: str) -> Tensor:
    """Return one tensor of a safetensors file. Raises ConversionError if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path}: {key} cannot be read: {error}") from error
    return tensor


def _load_bin(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a `.bin` file, memory-mapped. Raises ConversionError if it is broken."""
    try:
        loaded = load_file(path)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error
    if not isinstance(loaded, Mapping):
        raise ConversionError(f"{path}: expected a state dict, found {type(loaded).__name__}")
    return loaded
