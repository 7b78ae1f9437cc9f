"""Second copy of the weights, of the reference model to which preferences compare the model in training.

The copy has the shape in which this rank keeps the model's own weights: with ZeRO 3 the rank's share of each, else all.
To compute with it, it takes their place in the same network, so that the reference runs with every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from neox.data.answers import PER_PAIR
from neox.engine.engine import Engine
from neox.engine.reference import sums_of_batch
from neox.engine.steps import to_device
from neox.objectives import Batch


class WeightsCopy:
    """Copy of what this rank holds of a model's weights.

    Args:
        model: The model, with the weights that are copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors: list[tuple[nn.Parameter, Tensor]] = []
        for parameter in model.parameters():
            self._tensors.append((parameter, _held(parameter).detach().clone()))

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(tensor.nbytes for _, tensor in self._tensors)

    @contextmanager
    def in_place(self, engine: Engine) -> Iterator[None]:
        """Let an engine compute with the copy instead of the weights in training; all ranks call it together.

        Args:
            engine: Engine of the model.
        """
        self._swap(engine)
        try:
            yield
        finally:
            self._swap(engine)

    def _swap(self, engine: Engine) -> None:
        """Exchange the copy and the weights. What ZeRO 3 has gathered is released, because it is of the others."""
        offload = getattr(engine.deepspeed_engine.optimizer, "parameter_offload", None)
        if offload is not None:
            offload.empty_partition_cache()
        exchanged = []
        for parameter, copy in self._tensors:
            held = _held(parameter)
            exchanged.append((parameter, held.data))
            held.data = copy
        self._tensors = exchanged


def _held(parameter: nn.Parameter) -> Tensor:
    """Return the tensor in which this rank holds a parameter: with ZeRO 3 its share, else the parameter itself."""
    share: Tensor = getattr(parameter, "ds_tensor", parameter)
    return share


class CopiedReference:
    """The reference model of a run that keeps it as a second copy of the weights.

    Args:
        engine: Engine of the run.
        weights: Weights that the run began with.
    """

    def __init__(self, engine: Engine, weights: WeightsCopy) -> None:
        self._engine = engine
        self._weights = weights

    @torch.no_grad()
    def complete(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Return the next micro batches with their log-probabilities, `reference` [B, 2 P]; all ranks call it together.

        No random numbers are drawn.

        Args:
            batches: Micro batches of this data rank.
            count: Number of micro batches.
        """
        completed = []
        with self._weights.in_place(self._engine):
            for _ in range(count):
                batch = next(batches)
                device = self._engine.device
                sums = sums_of_batch(self._engine, {name: to_device(field, device) for name, field in batch.items()})
                completed.append({**batch, "reference": sums.view(len(sums), PER_PAIR * sums.shape[1])})
        return iter(completed)
