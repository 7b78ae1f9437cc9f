"""Reading of the weights in a Hugging Face directory, one tensor at a time."""

from __future__ import annotations

from collections import Counter
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
from neox.families.wrappers import text_key
from neox.files import placeholder_at
from neox.log import get_logger

_log = get_logger(__name__)
_MOST_NAMES = 4

_SCALES = ("_scale_inv", "_scales")  # DeepSeek's, gpt-oss'
_BLOCKS = "_blocks"
_FP8_BLOCK = 128
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class HFWeights:
    """Tensors of a Hugging Face directory by key: safetensors or bin, one file or shards with an index.

    Files are memory-mapped.

    Args:
        directory: The directory.
        family: Family of the model, which knows other names of the same tensors.
        is_wrapped: Whether the model is the text network of a larger one, which has other networks.

    Raises:
        ConversionError: If there are no files, a shard is missing or a file is broken.
    """

    def __init__(self, directory: Path, family: Family, *, is_wrapped: bool = False) -> None:
        self.directory = directory
        self.family = family
        files = _find_files(directory)
        self._stored: dict[str, tuple[Path, str]] = {}  # key of the network -> its file, and its key there
        self._scales: dict[str, tuple[Path, str]] = {}  # the same of the scales of quantized tensors
        self._open_bin: tuple[Path, Mapping[str, Tensor]] | None = None
        self._stored_as: dict[str, str] = {}

        # The prefix of a text network inside of a larger model is taken off. The larger model's other networks, and
        # what the family's class in transformers ignores, are left out.
        left_out: Counter[str] = Counter()
        renamed = {key: text_key(key, family.base_prefix) for key in files}
        has_prefix = any(renamed.values())
        heads = family.head_keys()
        for key, path in files.items():
            name = renamed[key] or key
            is_head = name in heads
            if has_prefix:
                is_other = is_wrapped and renamed[key] is None and not is_head
            else:
                is_other = is_wrapped and not key.startswith(family.base_prefix) and not is_head
            if is_other or name.startswith(family.ignored):
                left_out[_network_of(key)] += 1
            elif name.endswith(_SCALES):
                self._scales[_scaled(name)] = (path, key)
            elif _scaled(name) in self._stored:
                raise ConversionError(f"{directory}: {key} and {self._stored[_scaled(name)][1]} are the same tensor")
            else:
                self._stored[_scaled(name)] = (path, key)
        alone = sorted(self._scales.keys() - self._stored.keys())
        if alone:
            raise ConversionError(f"{directory}: scales without quantized tensors: {', '.join(alone[:_MOST_NAMES])}")
        if self._scales:
            _log.info("%s: %d quantized tensors are read as bf16", directory, len(self._scales))
        if left_out:
            counted = []
            for network, number in sorted(left_out.items()):
                counted.append(f"{number} of {network}")
            _log.warning(
                "%s: left out tensors that are not the text network's, as in AutoModelForCausalLM: %s",
                directory,
                ", ".join(counted),
            )

    def rename(self, key: str, stored: str) -> None:
        """Let a key that the files lack mean a tensor that they hold under another one."""
        self._stored_as[key] = stored

    @property
    def files(self) -> set[Path]:
        """The files that hold the tensors."""
        return {path for path, _ in (*self._stored.values(), *self._scales.values())}

    @cached_property
    def keys(self) -> frozenset[str]:
        """Keys of all weights, without buffers."""
        return frozenset(key for key in self._stored if not key.endswith(self.family.buffers))

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
        path, stored = self._stored[key]
        tensor = self._read(path, stored)
        if key in self._scales:
            scales = self._read(*self._scales[key])
            tensor = _from_mxfp4(tensor, scales) if stored.endswith(_BLOCKS) else _from_fp8(tensor, scales)
        if tensor.dtype not in _PLAIN_DTYPES:
            raise ConversionError(
                f"{path}: {stored} is stored as {str(tensor.dtype).removeprefix('torch.')}: quantized weights are not "
                "supported; save the model with 16-bit or 32-bit weights first"
            )
        return tensor

    def _read(self, path: Path, stored: str) -> Tensor:
        """Return a tensor of a file. Raises ConversionError if it cannot be read."""
        if path.suffix == ".safetensors":
            from safetensors import SafetensorError, safe_open

            try:
                with safe_open(str(path), framework="pt") as opened:
                    tensor: Tensor = opened.get_tensor(stored)
            except (SafetensorError, OSError) as error:
                raise ConversionError(f"{path}: {stored} cannot be read: {error}") from error
        else:
            if self._open_bin is None or self._open_bin[0] != path:
                self._open_bin = None  # closes the file before the next one is mapped
                self._open_bin = (path, _load_bin(path))
            tensor = self._open_bin[1][stored]
        return tensor


def _scaled(name: str) -> str:
    """Return the name of a tensor in a network, without the ends that quantization adds."""
    for ending in (*_SCALES, _BLOCKS):
        name = name.removesuffix(ending)
    return name


def _from_fp8(weight: Tensor, scales: Tensor) -> Tensor:
    """Return fp8 weights as bf16, as DeepSeek's own `fp8_cast_bf16.py`.

    Args:
        weight: Weights in float8_e4m3fn [rows, columns].
        scales: Factor of each square block of 128 rows [rows / 128, columns / 128], rounded up, fp32.
    """
    if weight.dtype != torch.float8_e4m3fn or scales.dim() != weight.dim():
        return weight  # refused by its dtype
    factors = scales.float()
    for dim, size in enumerate(weight.shape):
        factors = factors.repeat_interleave(_FP8_BLOCK, dim).narrow(dim, 0, size)
    return (weight.float() * factors).to(torch.bfloat16)


def _from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the experts of gpt-oss as bf16 [experts, inputs, outputs] (OCP Microscaling Formats, 5.3: E2M1).

    Args:
        blocks: Two numbers in each byte, the first one in its low half, uint8 [experts, outputs, blocks, 16].
        scales: Exponent of two of each block, plus 127, uint8 [experts, outputs, blocks].
    """
    table = torch.tensor(_E2M1, dtype=torch.bfloat16)
    pairs = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), dim=-1)  # [E, O, blocks, 16, 2]
    values = torch.ldexp(pairs.flatten(3), scales.int()[..., None] - 127)
    return values.flatten(2).transpose(1, 2).contiguous()


def _network_of(key: str) -> str:
    """Return the name of the network that a key belongs to: what stands before its layers."""
    names = key.split(".")
    return ".".join(names[: 2 if names[0] == "model" else 1]) + ".*"


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
        reason = placeholder_at(path) or f"broken, or not a safetensors file: {error}"
        raise ConversionError(f"{path}: {reason}") from error


def _load_bin(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a `.bin` file, memory-mapped. Raises ConversionError if it is broken."""
    try:
        loaded = load_file(path)
    except CheckpointError as error:
        pointer = placeholder_at(path)
        raise ConversionError(str(error) if pointer is None else f"{path}: {pointer}") from error
    if not isinstance(loaded, Mapping):
        raise ConversionError(f"{path}: expected a state dict, found {type(loaded).__name__}")
    return loaded
