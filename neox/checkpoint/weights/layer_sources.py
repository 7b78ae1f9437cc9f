"""Files that hold a checkpoint's weights: layer files, or `mp_rank` files of one stage."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from neox.checkpoint.gpt_neox.expert_forms import convert_experts, has_experts
from neox.checkpoint.gpt_neox.layer_forms import layer_weights
from neox.checkpoint.weights.tensor_files import load_file
from neox.checkpoint_files.contents import WeightFiles, weight_files
from neox.checkpoint_files.names import layer_file
from neox.errors import CheckpointError

_SEQUENTIAL = re.compile(r"^(?:module\.)?sequential\.(\d+)\.(.+)$")


class WeightSource(Protocol):
    """A checkpoint's weights by layer index and tensor rank.

    Attributes:
        tp_size: Tensor-parallel degree of the files.
        indices: Layers that have files, in ascending order.
    """

    tp_size: int
    indices: tuple[int, ...]

    def state(self, index: int, tp_rank: int) -> Mapping[str, Tensor]:
        """Return the weights of one layer on one tensor rank by canonical name, memory-mapped."""
        ...

    def stored_names(self, index: int) -> tuple[str, ...]:
        """Return the names of a layer's entries in the file of tensor rank 0, as they are."""
        ...


class LayerFiles:
    """Layer files `layer_XX-model_YY-model_states.pt`."""

    def __init__(self, found: WeightFiles) -> None:
        self.indices = tuple(sorted(found.layers))
        self.tp_size = found.tp_size
        self._found = found.layers

    def state(self, index: int, tp_rank: int) -> Mapping[str, Tensor]:
        """Return the weights of one layer on one tensor rank."""
        return layer_weights(self._load(index, tp_rank))

    def stored_names(self, index: int) -> tuple[str, ...]:
        """Return the names of a layer's entries in the file of tensor rank 0, as they are."""
        return tuple(self._load(index, 0))

    def _load(self, index: int, tp_rank: int) -> Mapping[str, Any]:
        path = self._found[index][tp_rank]
        loaded = load_file(path)
        if not isinstance(loaded, Mapping):
            raise CheckpointError(f"{path}: expected a state dict, found {type(loaded).__name__}")
        return loaded


class ExpertFiles:
    """Weights of a checkpoint, with gpt-neox's experts converted to this program's format.

    Args:
        directory: The checkpoint.
        source: Files of the checkpoint.
    """

    def __init__(self, directory: Path, source: WeightSource) -> None:
        self.tp_size = source.tp_size
        self.indices = source.indices
        self._directory = directory
        self._source = source

    def state(self, index: int, tp_rank: int) -> Mapping[str, Tensor]:
        """Return the weights of one layer on one tensor rank."""
        own = self._source.state(index, tp_rank)
        if not has_experts(own):
            return own
        states = [self._source.state(index, rank) for rank in range(self.tp_size)]
        return convert_experts(states, tp_rank, str(self._directory / layer_file(index, 0)))

    def stored_names(self, index: int) -> tuple[str, ...]:
        """Return the names of a layer's entries in the file of tensor rank 0, as they are."""
        return self._source.stored_names(index)


class OneStageFiles:
    """`mp_rank_XX` files whose `module` holds all layers of a tensor rank under `sequential.N.key`."""

    def __init__(self, paths: Mapping[int, Path]) -> None:
        self.tp_size = len(paths)
        self._paths = paths
        self.indices = tuple(sorted(_by_layer(paths[0], load_file(paths[0]))))

    def state(self, index: int, tp_rank: int) -> Mapping[str, Tensor]:
        """Return the weights of one layer on one tensor rank."""
        return layer_weights(self._load(index, tp_rank))

    def stored_names(self, index: int) -> tuple[str, ...]:
        """Return the names of a layer's entries in the file of tensor rank 0, as they are."""
        return tuple(self._load(index, 0))

    def _load(self, index: int, tp_rank: int) -> Mapping[str, Any]:
        path = self._paths[tp_rank]
        return _by_layer(path, load_file(path)).get(index, {})


def open_source(directory: Path) -> WeightSource:
    """Open the weights in a checkpoint directory. Raises CheckpointError if there are none or some are missing."""
    found = weight_files(directory)
    if found.layers:
        return ExpertFiles(directory, LayerFiles(found))
    return ExpertFiles(directory, OneStageFiles(found.ranks))


def _by_layer(path: Path, loaded: Any) -> dict[int, dict[str, Tensor]]:
    """Return the tensors of an `mp_rank` file by layer index and name."""
    module = None
    if isinstance(loaded, Mapping):
        module = loaded.get("module")
    if not isinstance(module, Mapping):
        raise CheckpointError(f"{path}: holds no weights, and there are no layer files next to it")
    layers: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in module.items():
        match = _SEQUENTIAL.match(key)
        if match and isinstance(tensor, Tensor):
            layers[int(match[1])][match[2]] = tensor
    if not layers:
        raise CheckpointError(f"{path}: its module has no `sequential.N.` weights")
    return layers
