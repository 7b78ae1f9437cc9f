"""Writing layer files in NeoX's layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from neox.architecture import LayerEntry
from neox.checkpoint.files import PiecewiseFile
from neox.checkpoint.joining import neox_shard
from neox.checkpoint.names import CONFIG, layer_file, mp_rank_file
from neox.errors import CheckpointError


def write_layer(directory: Path, index: int, tp_rank: int, state_dict: Mapping[str, Tensor]) -> Path:
    """Write one layer's weights of one tensor rank as they are; return the file's path.

    Views are copied first: torch saves a view's whole storage. Raises CheckpointError when the disk refuses.
    """
    return save_file(directory / layer_file(index, tp_rank), {k: _own(v) for k, v in state_dict.items()})


def write_full_layer(directory: Path, layer: LayerEntry, state: Mapping[str, Tensor], tp_size: int) -> None:
    """Write one layer from full tensors as `tp_size` files; a summed bias goes whole to rank 0, zeros to the others."""
    for rank in range(tp_size):
        split = {p.name: neox_shard(p, state[p.name], rank, tp_size) for p in layer.parameters}
        write_layer(directory, layer.index, rank, split)


def neox_state(layer: LayerEntry, state: Mapping[str, Tensor], tp_rank: int) -> dict[str, Tensor]:
    """A layer's own state dict as gpt-neox's files hold it: biases that NeoX sums become zero on ranks other than 0."""
    summed = {p.name for p in layer.parameters if p.summed_in_neox} if tp_rank > 0 else set()
    return {name: torch.zeros_like(value) if name in summed else value for name, value in state.items()}


def write_client_state(directory: Path, mp_rank: int, state: Mapping[str, Any]) -> Path:
    """Write an `mp_rank` file that holds no weights, for checkpoints made by tools. Raises CheckpointError."""
    return save_file(directory / mp_rank_file(mp_rank), {"module": None, **state})


def write_config(directory: Path, flat: Mapping[str, Any]) -> Path:
    """Write the run's keys as YAML into `configs/` of a checkpoint, where gpt-neox keeps its files too.

    Raises CheckpointError when the disk refuses.
    """
    path = directory / CONFIG
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(json.loads(json.dumps(flat)), sort_keys=True), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def save_file(path: Path, value: Any) -> Path:
    """`torch.save` whose failures (a full disk, no permission) are CheckpointError with the path."""
    file = None
    try:
        with PiecewiseFile(path) as file:
            torch.save(value, file)
    except (OSError, RuntimeError) as error:
        cause = file.failure if file is not None and file.failure is not None else error
        reason = cause.strerror if isinstance(cause, OSError) else str(cause).strip().splitlines()[0]
        raise CheckpointError(f"{path}: cannot be written: {reason}") from error
    return path


def _own(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    if whole and tensor.device.type == "cpu":
        return tensor
    return tensor.cpu().clone(memory_format=torch.contiguous_format)
