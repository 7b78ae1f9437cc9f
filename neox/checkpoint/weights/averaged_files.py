"""Files of averaged weights (`ema_decay`): parts of parameters from each rank, read as whole layers.

Each rank writes the parts that it holds. A file is a mapping from the index of a layer and the name of a parameter to
(first element in the flattened parameter of the tensor rank, fp32 values).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from neox.checkpoint.weights.layer_sources import WeightSource
from neox.checkpoint.weights.tensor_files import load_file
from neox.checkpoint_files.names import averaged_file, canonical_parameter, parse_averaged_file
from neox.errors import CheckpointError

LoadedWeights = Literal["trained", "ema"]
"""Weights of a checkpoint: those that the optimizer has trained, or their average."""

Parts = Mapping[int, Mapping[str, tuple[int, Tensor]]]
"""Content of a file: layer -> parameter -> (first element, values)."""


class AveragedFiles:
    """Averaged weights of a checkpoint. Weights that were not trained are those of the layer files.

    Args:
        directory: The checkpoint.
        trained: Its layer files.

    Attributes:
        tp_size: Tensor-parallel degree of the files.
        indices: Layers that have weights, in ascending order.

    Raises:
        CheckpointError: If there are no averaged weights.
    """

    def __init__(self, directory: Path, trained: WeightSource) -> None:
        self.tp_size = trained.tp_size
        self.indices = trained.indices
        self._directory = directory
        self._trained = trained
        self._files: dict[tuple[int, int], list[tuple[int, Path]]] = defaultdict(list)  # with the stage of each
        for path in sorted(directory.iterdir()):
            model_rank = parse_averaged_file(path.name)
            if model_rank is None:
                continue
            parts: Parts = load_file(path)
            stage, tp_rank = divmod(model_rank, self.tp_size)
            for index in parts:
                self._files[index, tp_rank].append((stage, path))
        if not self._files:
            raise CheckpointError(
                f"{directory}: holds no averaged weights ({averaged_file(0, 0)}, ...), because its run had no "
                "ema_decay; read the trained weights"
            )

    def state(self, index: int, tp_rank: int) -> Mapping[str, Tensor]:
        """Return the weights of one layer on one tensor rank by canonical name.

        Several stages hold a tied embedding, and divide it at other places. One of them is read.
        """
        trained = self._trained.state(index, tp_rank)
        found: dict[str, dict[int, Tensor]] = defaultdict(dict)
        stage_of: dict[str, int] = {}
        for stage, path in self._files[index, tp_rank]:
            parts: Parts = load_file(path)
            for name, (first, values) in parts[index].items():
                canonical = canonical_parameter(name)
                if stage_of.setdefault(canonical, stage) == stage:
                    found[canonical][first] = values
        weights = dict(trained)
        for name, pieces in found.items():
            if name in trained:
                weights[name] = self._joined(index, name, pieces, trained[name])
        return weights

    def stored_names(self, index: int) -> tuple[str, ...]:
        """Return the names of a layer's entries in the file of tensor rank 0, as they are."""
        return self._trained.stored_names(index)

    def _joined(self, index: int, name: str, pieces: Mapping[int, Tensor], like: Tensor) -> Tensor:
        """Return a parameter from its pieces by first element, in the shape of the trained one."""
        in_order = []
        length = 0
        for first in sorted(pieces):
            if first != length:
                break
            in_order.append(pieces[first])
            length += pieces[first].numel()
        if length != like.numel():
            raise CheckpointError(
                f"{self._directory}: averaged weights of layer {index} {name} have {length:,} elements in a row, "
                f"and {like.numel():,} are needed: files of averaged weights are missing"
            )
        if len(in_order) == 1:
            return in_order[0].view(like.shape)
        return torch.cat(in_order).view(like.shape)
