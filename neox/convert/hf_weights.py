"""Reading of the weights in a Hugging Face directory, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from neox.architecture import Architecture
from neox.checkpoint import load_file
from neox.convert.hf_directory import BIN, INDEX_ENDING, SAFETENSORS, read_json
from neox.errors import CheckpointError, ConversionError
from neox.families import Family
from neox.log import get_logger

_log = get_logger(__name__)
_MOST_NAMES = 4

_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
        self._stored_as: dict[str, str] = {}

    def rename(self, key: str, stored: str) -> None:
        """Let a key that the files lack mean a tensor that they hold under another one."""
        self._stored_as[key] = stored

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
        if key in self._stored_as:
            candidates.append(self._stored_as[key])
        for alias, ending in self.family.key_aliases.items():
            if key.endswith(ending):
                candidates.append(key.removesuffix(ending) + alias)
        for candidate in candidates:
            if candidate in self.keys:
                return candidate
        return None

    def get(self, key: str) -> Tensor:
        """Return a stored tensor, possibly a view of a mapped file.

        Raises:
            ConversionError: If it cannot be read, or is quantized: its numbers need scales that are other tensors.
        """
        path = self._file_of[key]
        if path.suffix == ".safetensors":
            from safetensors import SafetensorError, safe_open

            try:
                with safe_open(str(path), framework="pt") as opened:
                    tensor: Tensor = opened.get_tensor(key)
            except (SafetensorError, OSError) as error:
                raise ConversionError(f"{path}: {key} cannot be read: {error}") from error
        else:
            if self._open_bin is None or self._open_bin[0] != path:
                self._open_bin = None  # closes the file before the next one is mapped
                self._open_bin = (path, _load_bin(path))
            tensor = self._open_bin[1][key]
        if tensor.dtype not in _PLAIN_DTYPES:
            raise ConversionError(
                f"{path}: {key} is stored as {str(tensor.dtype).removeprefix('torch.')}: quantized weights are not "
                "supported; save the model with 16-bit or 32-bit weights first"
            )
        return tensor


def with_own_head(architecture: Architecture, weights: HFWeights) -> Architecture:
    """Return an architecture with the head that the files hold: one of its own if it differs from the embedding.

    Fine-tuning with extended embeddings leaves such files, whose `config.json` still says that the weights are
    tied. Like transformers 5, an import believes the tensors.

    Args:
        architecture: The network of `config.json`.
        weights: The files.

    Raises:
        ConversionError: If the head differs, and networks of this kind cannot have one of their own.
    """
    if not architecture.tie_word_embeddings or architecture.score_head:
        return architecture
    family = weights.family
    originals = {"weight": family.tensors["embedding"]["word_embeddings"].modules[0]}
    if family.is_encoder:
        originals["bias"] = family.tensors["masked_lm_head"]["final_linear"].modules[0]
    different = []
    for key in sorted(family.head_keys() & weights.keys):
        kind = key.rpartition(".")[2]
        original = weights.find(f"{originals[kind]}.{kind}")
        if original is None:
            weights.rename(f"{originals[kind]}.{kind}", key)  # tied files may hold either of the two
        elif original != key and not torch.equal(weights.get(key), weights.get(original)):
            different.append(f"{key} differs from {original}")
    if not different:
        return architecture
    says = f"{weights.directory}: config.json says that head and embedding are tied, but {', '.join(different)}"
    if family.is_encoder:
        raise ConversionError(f"{says}: a head of its own is not supported for {family.title}")
    _log.warning("%s: the model gets a head of its own, as in transformers 5", says)
    return replace(architecture, tie_word_embeddings=False)


def _find_files(directory: Path) -> dict[str, Path]:
    """Return the file of each key. Raises ConversionError if there are none or one is missing."""
    for name in (SAFETENSORS, BIN):  # in transformers' order
        single = directory / name
        index = directory / f"{name}{INDEX_ENDING}"
        if single.is_file():
            if index.is_file():
                _log.warning("%s is read, as by transformers, and not the shards that %s names", single, index)
            return dict.fromkeys(_keys_of(single), single)
        if index.is_file():
            return _files_of_index(index)
    raise ConversionError(
        f"{directory}: contains no {SAFETENSORS}, {BIN} or index of shards, so it is no Hugging Face model"
    )


def _files_of_index(index: Path) -> dict[str, Path]:
    """Return the file of each key of the shards of an index.

    transformers reads whole shards, also tensors that the index does not list. Such a tensor is unknown to the network,
    or the index is of other files.

    Raises:
        ConversionError: If a shard is missing, broken or lacks a tensor, or transformers would read another file's.
    """
    listed: dict[str, Path] = {}
    missing: set[str] = set()
    for key, name in read_json(index).get("weight_map", {}).items():
        listed[key] = index.parent / name
        if not listed[key].is_file():
            missing.add(str(listed[key]))
    if missing:
        raise ConversionError(f"{index} names files that are missing: {', '.join(sorted(missing))}")

    # The tensors that the files hold, listed or not.
    files_with: dict[str, list[Path]] = {}
    for path in sorted(set(listed.values())):
        for key in _keys_of(path):
            files_with.setdefault(key, []).append(path)
    absent = sorted(key for key, path in listed.items() if path not in files_with.get(key, ()))
    if absent:
        where = ", ".join(f"{key} (in {listed[key].name})" for key in absent[:_MOST_NAMES])
        raise ConversionError(f"{index} lists tensors that their files do not hold: {where}; download all files again")
    unlisted = sorted(files_with.keys() - listed.keys())
    if unlisted:
        where = ", ".join(f"{key} (in {files_with[key][0].name})" for key in unlisted[:_MOST_NAMES])
        _log.warning(
            "%s does not list %d tensors of its files, which are read all the same: %s", index, len(unlisted), where
        )
    # transformers takes the tensor of the last file
    several = sorted(key for key, paths in files_with.items() if len(paths) > 1 and listed.get(key) != paths[-1])
    if several:
        where = ", ".join(
            f"{key} (in {' and '.join(path.name for path in files_with[key])})" for key in several[:_MOST_NAMES]
        )
        raise ConversionError(
            f"{index}: several files hold the same tensor: {where}; remove the files of another model"
        )
    return {**listed, **{key: files_with[key][0] for key in unlisted}}


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


def _load_bin(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a `.bin` file, memory-mapped. Raises ConversionError if it is broken."""
    try:
        loaded = load_file(path)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error
    if not isinstance(loaded, Mapping):
        raise ConversionError(f"{path}: expected a state dict, found {type(loaded).__name__}")
    return loaded
