"""Where a save's files go: to the disk at once, or into memory first, to be written while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from torch import Tensor

from neox.checkpoint import layer_file, load_file, save_file, write_layer
from neox.errors import CheckpointError


class FileWriter(CheckpointEngine):
    """DeepSpeed's files and ours. A failure is kept for later, because DeepSpeed raises between collectives otherwise.

    with_optimizer: False leaves the optimizer's state out. later: keep copies in CPU memory until `write_queued`.
    """

    def __init__(self, with_optimizer: bool, *, later: bool = False) -> None:
        self.name = "layer-files"
        self.with_optimizer, self.later = with_optimizer, later
        self.failure: CheckpointError | None = None
        self._queue: list[tuple[Path, Any]] = []

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing is left to do: the directory is there."""

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """DeepSpeed's own files."""
        if not self.with_optimizer:
            if path.endswith("optim_states.pt"):
                return
            state_dict = {**state_dict, "optimizer": None}
        self.put(Path(path), state_dict)

    def put(self, path: Path, value: Any) -> None:
        """Write a file, or keep a copy of what it will hold."""
        if self.later:
            self._queue.append((path, snapshot(value)))
            return
        try:
            save_file(path, value)
        except CheckpointError as error:
            self.failure = error

    def put_layer(self, directory: Path, index: int, state: Mapping[str, Tensor], *, tp_rank: int) -> None:
        """A layer file. Raises CheckpointError when the disk refuses."""
        if self.later:
            self.put(directory / layer_file(index, tp_rank), dict(state))
        else:
            write_layer(directory, index, tp_rank, state)

    def write_queued(self) -> None:
        """Write what is kept, and let go of each piece as soon as it is on disk. Raises CheckpointError."""
        while self._queue:
            save_file(*self._queue.pop(0))

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_file(Path(path))

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


def snapshot(value: Any) -> Any:
    """Copy a state dict into CPU memory; one tensor in two places stays one tensor."""
    return _snapshot(value, {})


def _snapshot(value: Any, seen: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = value.detach().to("cpu", copy=True)
        return seen[id(value)]
    if type(value) in (dict, list, tuple):
        if isinstance(value, dict):
            return {key: _snapshot(item, seen) for key, item in value.items()}
        return type(value)(_snapshot(item, seen) for item in value)
    if isinstance(value, Mapping) and hasattr(value, "items"):  # OrderedDict and its kin: as saved at once
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _snapshot(item, seen)  # type: ignore[index]
        return copied
    return copy.deepcopy(value)
