"""Mean of several checkpoints of a model, whatever their degrees, as a new checkpoint of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from neox.architecture import ParameterSpec
from neox.checkpoint.derived.rewriting import check_degree, identity_of, rewrite
from neox.checkpoint.weights.reader import CheckpointReader
from neox.checkpoint_files.contents import damaged_weights, why_incomplete
from neox.checkpoint_files.finding import checkpoint_directories, names_of_checkpoints
from neox.checkpoint_files.names import AVERAGED_FROM, CONFIG
from neox.config.yaml_file import read_file
from neox.errors import CheckpointError, ConfigError
from neox.plan import saved_architecture
from neox.plan.schedule import FINAL_DECAYS

Weighting = Literal["mean", "linear", "decay"]
"""How much each checkpoint counts, the oldest first: all the same, as 1 : 2 : 3, or as if the learning rate decayed."""


def last_checkpoints(save: Path, count: int) -> list[Path]:
    """Return the last complete checkpoints of a run, the oldest first; files are checked by their sizes.

    Raises:
        ConfigError: If the directory has fewer.
    """
    complete: list[Path] = []
    if save.is_dir():
        for path in checkpoint_directories(save):
            if len(complete) < count and not why_incomplete(path, hashes=False):
                complete.append(path)
    if len(complete) < count:
        found = names_of_checkpoints(save) if save.is_dir() else ""
        raise ConfigError(
            f"{save} has {len(complete)} complete checkpoints, and {count} are asked for; it holds {found or 'none'}: "
            "give a smaller --last, or save more of them (checkpoint_factor, keep_last_n_checkpoints)"
        )
    return complete[::-1]


def checkpoint_weights(weighting: Weighting, count: int, decay: str = "linear") -> list[float]:
    """Return the weight of each checkpoint in the mean, the oldest first; they add up to 1.

    With `decay`, the mean imitates a decay of the learning rate over these checkpoints (arXiv:2507.17634). A decay to
    f(p) after the fraction p of the steps would scale the step from checkpoint i - 1 to i by f(i / n). The mean of
    checkpoints c_0 w_0 + ... + c_(n-1) w_(n-1) is w_0 plus each of these steps, scaled by the sum of all later c. So
    c_i = f(i / n) - f((i + 1) / n). A linear decay gives the plain mean.

    Args:
        weighting: How much each checkpoint counts.
        count: n, the number of checkpoints.
        decay: Shape of the decay, a value of `lr_wsd_decay_style`.
    """
    if weighting == "mean":
        return [1 / count] * count
    if weighting == "linear":
        total = count * (count + 1) / 2
        numbers: list[float] = (np.arange(1, count + 1) / total).tolist()
        return numbers
    left = list(map(FINAL_DECAYS[decay], np.arange(count + 1) / count))
    differences: list[float] = (-np.diff(left)).tolist()
    return differences


def average_checkpoints(
    readers: Sequence[CheckpointReader], weights: Sequence[float], save: Path, *, tp_size: int, pp_size: int
) -> Path:
    """Write a weighted mean of checkpoints as `save/global_stepN`, N that of the last one, and commit it.

    Sums are fp32, and one tensor of each checkpoint is read at a time; the result has the precision of the last one. It
    has no optimizer state. Adapters are added to the weights.

    Args:
        readers: The checkpoints, opened with the layers of the last one.
        weights: Weight of each checkpoint; they add up to 1.
        save: Directory of checkpoints to write into.
        tp_size: Tensor ranks of the result.
        pp_size: Pipeline stages of the result.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointError: If a checkpoint is damaged, of another model, or would be replaced, if a dimension does not
            divide, or the disk refuses.
    """
    assert abs(fsum(weights) - 1) < 1e-6, weights
    last = readers[-1]
    layers = last.layers
    assert layers is not None
    check_degree(layers, tp_size)
    _refuse_other_models(readers)
    _refuse_damaged(readers[:-1], save / last.path.name)

    def mean(index: int, spec: ParameterSpec) -> Tensor:
        stored = last.full(index, spec.name)
        total = torch.zeros(stored.shape)
        for reader, weight in zip(readers, weights, strict=True):
            total.add_(reader.full(index, spec.name).float(), alpha=weight)
        return total.to(stored.dtype)

    identity = identity_of(last, tp_size, pp_size)
    identity[AVERAGED_FROM] = {}
    for reader, weight in zip(readers, weights, strict=True):
        identity[AVERAGED_FROM][str(reader.path.resolve())] = weight
    config = saved_keys(last.path)
    written = rewrite(last, save, layers, mean, identity=identity, tp_size=tp_size, pp_size=pp_size, config=config)
    for reader in readers:
        reader.note_averages()
    return written


def saved_keys(checkpoint: Path) -> Mapping[str, Any] | None:
    """Return the keys of the run that wrote a checkpoint; None if it does not hold them."""
    file = checkpoint / CONFIG
    if not file.is_file():
        return None
    return read_file(file).values


def _refuse_damaged(readers: Sequence[CheckpointReader], target: Path) -> None:
    """Raise CheckpointError if a checkpoint is damaged, or is the one that would be written."""
    for reader in readers:
        if target.exists() and target.samefile(reader.path):
            raise CheckpointError(f"{target} is read, and the result would replace it; choose another directory")
        problems = damaged_weights(reader.path)
        if problems:
            raise CheckpointError(f"{reader.path} is not complete: {'; '.join(problems)}")


def _refuse_other_models(readers: Sequence[CheckpointReader]) -> None:
    """Raise CheckpointError if the checkpoints do not describe the same network."""
    last = readers[-1]
    wanted = saved_architecture(last.args)
    for reader in readers[:-1]:
        found = saved_architecture(reader.args)
        differing = []
        for key in sorted(wanted.keys() | found.keys()):
            if wanted.get(key) != found.get(key):
                differing.append(f"{key} is {found.get(key)} and {wanted.get(key)}")
        if differing:
            raise CheckpointError(
                f"{reader.path} is of another model than {last.path}: {', '.join(differing)}; average checkpoints of "
                "one model"
            )
