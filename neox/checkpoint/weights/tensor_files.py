"""Files of tensors: safe reading of `.pt` files, writing in small pieces, and layer files in NeoX's layout."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

import numpy as np
import torch
import yaml
from torch import Tensor

from neox.architecture import LayerEntry
from neox.checkpoint.remote.partial_copies import fetch_file
from neox.checkpoint.weights.shards import neox_shard
from neox.checkpoint_files.manifest import is_unfetched
from neox.checkpoint_files.names import CONFIG, ROWS, layer_file, mp_rank_file
from neox.errors import CheckpointError, os_errors
from neox.files import placeholder_at
from neox.plan.run_identity import RUN_FILE, RunIdentity, identity_text

WRITE_BYTES = 128 << 10
"""Bytes of one write.

For a longer one the kernel takes its largest free pages. On a virtual machine these are pages that the host has taken
back and gives again slowly (measured: ten times the time of the copy). A longer write also holds the file's lock.
"""


class SavedScaler:
    """Stand-in for DeepSpeed's loss scalers: their saved attributes without behaviour."""

    cur_scale: float


class SavedFragment:
    """Stand-in for DeepSpeed's `fragment_address`: position of a parameter's part in a flat buffer, in elements."""

    numel: int
    start: int


_reconstruct = np.zeros(0).__reduce__()[0]

# Types, and pairs of a callable and its name in the pickle. DeepSpeed's types become stand-ins, so that reading does
# not import deepspeed.
_ALLOWED: tuple[Any, ...] = (
    (_reconstruct, "numpy.core.multiarray._reconstruct"),
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
    (np.ndarray, "numpy.ndarray"),
    (np.dtype, "numpy.dtype"),
    type(np.dtype(np.uint32)),
    type(np.dtype(np.int64)),
    type(np.dtype(np.float64)),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (SavedScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (SavedScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (SavedFragment, "deepspeed.utils.tensor_fragment.fragment_address"),
)


def load_file(path: Path) -> Any:
    """Load one `.pt` file on the CPU, unpickling only tensors, plain values and the types listed above.

    Tensors are memory-mapped privately: writing into one does not change the file. A file of a partial copy is fetched
    if it is not here.

    Raises:
        CheckpointError: If the file is missing, truncated, not a torch file, holds another type, or cannot be fetched.
    """
    if is_unfetched(path):
        fetch_file(path)
    try:
        size = path.stat().st_size
        mapped = zipfile.is_zipfile(path)  # files older than torch 1.6 are no zip and cannot be mapped
        with torch.serialization.safe_globals(list(_ALLOWED)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: {placeholder_at(path) or _unpickling_reason(error)}") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = "empty"
        if size > 0:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path}: broken or no torch file ({reason}); use another checkpoint") from error


def _unpickling_reason(error: pickle.UnpicklingError) -> str:
    """Return why a file was not unpickled, in our words."""
    text = str(error)
    if "Unsupported global: GLOBAL " in text:
        name = text.split("Unsupported global: GLOBAL ", 1)[1].split()[0]
        return f"holds an object of type {name}; only tensors, plain values and the types in neox.checkpoint are read"
    return "cannot be unpickled; the file is broken, or holds something other than tensors and plain values"


class _PiecewiseFile:
    """A new file for `torch.save`, written in pieces of `WRITE_BYTES`.

    Attributes:
        failure: First OSError of a write; torch raises another exception in its place.
    """

    def __init__(self, path: Path) -> None:
        self.failure: OSError | None = None
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: BaseException | TracebackType | None) -> None:
        os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            while view:
                view = view[os.write(self._descriptor, view[:WRITE_BYTES]) :]
        except OSError as error:
            self.failure = self.failure or error
            raise
        return size

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""


def save_file(path: Path, value: Any) -> Path:
    """Write a value with `torch.save`; return the path. Raises CheckpointError if the disk refuses."""
    file = None
    try:
        with _PiecewiseFile(path) as file:
            torch.save(value, cast(IO[bytes], file))
    except (OSError, RuntimeError) as error:
        cause: Exception = error
        if file is not None and file.failure is not None:
            cause = file.failure
        if isinstance(cause, OSError):
            reason = cause.strerror
        else:
            reason = str(cause).strip().splitlines()[0]
        raise CheckpointError(f"{path}: cannot be written: {reason}") from error
    return path


def write_layer(directory: Path, index: int, tp_rank: int, state_dict: Mapping[str, Tensor]) -> Path:
    """Write one layer's weights on one tensor rank as they are.

    Args:
        directory: The checkpoint.
        index: Index of the layer.
        tp_rank: The tensor rank.
        state_dict: Parameters of the layer by name. Views are copied first, because torch saves a view's whole storage.

    Returns:
        The file's path.

    Raises:
        CheckpointError: If the disk refuses.
    """
    tensors = {name: _own_storage(tensor) for name, tensor in state_dict.items()}
    return save_file(directory / layer_file(index, tp_rank), tensors)


def _own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor in CPU memory that fills its storage."""
    tensor = tensor.detach()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    if whole and tensor.device.type == "cpu":
        return tensor
    return tensor.cpu().clone(memory_format=torch.contiguous_format)


def write_full_layer(directory: Path, layer: LayerEntry, state: Mapping[str, Tensor], tp_size: int) -> None:
    """Write one layer from full tensors as `tp_size` files. Rank 0 gets the whole of a summed bias, others zeros."""
    for rank in range(tp_size):
        part = {}
        for spec in layer.parameters:
            part[spec.name] = neox_shard(spec, state[spec.name], rank, tp_size)
        write_layer(directory, layer.index, rank, part)


def neox_state(layer: LayerEntry, state: Mapping[str, Tensor], tp_rank: int) -> dict[str, Tensor]:
    """Return a layer's state dict as gpt-neox's files hold it: summed biases are zero on ranks other than 0."""
    part = dict(state)
    if tp_rank > 0:
        for spec in layer.parameters:
            if spec.summed_in_neox and spec.name in part:
                part[spec.name] = torch.zeros_like(part[spec.name])
    return part


def write_client_state(directory: Path, mp_rank: int, state: Mapping[str, Any]) -> Path:
    """Write an `mp_rank` file without weights, for checkpoints made by tools. Raises CheckpointError."""
    return save_file(directory / mp_rank_file(mp_rank), {"module": None, ROWS: "blocks", **state})


def write_config(directory: Path, flat: Mapping[str, Any]) -> Path:
    """Write the run's keys as YAML into `configs/` of a checkpoint, like gpt-neox its files.

    Raises:
        CheckpointError: If the disk refuses.
    """
    path = directory / CONFIG
    with os_errors(CheckpointError, f"{path}: cannot be written"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(json.loads(json.dumps(flat)), sort_keys=True), encoding="utf-8")
    return path


def write_run(directory: Path, identity: RunIdentity, samples_per_step: int | None = None) -> Path:
    """Write the identity of a run, and the samples of its steps, into a checkpoint.

    Raises:
        CheckpointError: If the disk refuses.
    """
    path = directory / RUN_FILE
    with os_errors(CheckpointError, f"{path}: cannot be written"):
        path.write_text(identity_text(identity, samples_per_step), encoding="utf-8")
    return path
