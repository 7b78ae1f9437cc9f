"""Reference model of preference training, kept as a second copy of the weights.

The copy is sharded like the model's own weights: with ZeRO 3 it holds this rank's shard of each weight, otherwise the
whole weight. For a forward pass of the reference, the copy is swapped into the same network. So the reference runs with
every parallel layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from neox.data.answer_pairs.answers import ANSWERS_PER_PAIR
from neox.engine import Engine
from neox.engine.micro_batches import to_device
from neox.features.reference.log_probs import sums_of_batch
from neox.objectives import Batch


class WeightsCopy:
    """Copy of the weights, or shards of weights, that this rank holds.

    Args:
        model: The model with which the copy is swapped.
        of: Model of the same form whose weights become the copy; None to copy those of `model`.
    """

    def __init__(self, model: nn.Module, of: nn.Module | None = None) -> None:
        self._tensors: list[tuple[nn.Parameter, Tensor]] = []
        for parameter, source in zip(model.parameters(), (of or model).parameters(), strict=True):
            weights = _local_tensor(source).detach()
            if of is None:
                weights = weights.clone()
            self._tensors.append((parameter, weights))

    @property
    def nbytes(self) -> int:
        """Size of the copy in bytes."""
        return sum(tensor.nbytes for _, tensor in self._tensors)

    @contextmanager
    def in_place(self, engine: Engine) -> Iterator[None]:
        """Swap the copy into the engine's model inside a `with` block; all ranks call it together.

        Args:
            engine: Engine of the model.
        """
        self._swap(engine)
        try:
            yield
        finally:
            self._swap(engine)

    def _swap(self, engine: Engine) -> None:
        """Swap the copy and the weights. Free what ZeRO 3 has gathered, because it belongs to the other weights."""
        offload = getattr(engine.deepspeed_engine.optimizer, "parameter_offload", None)
        if offload is not None:
            offload.empty_partition_cache()
        exchanged = []
        for parameter, copy in self._tensors:
            local = _local_tensor(parameter)
            exchanged.append((parameter, local.data))
            local.data = copy
        self._tensors = exchanged


def _local_tensor(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a parameter with ZeRO 3, otherwise the parameter itself."""
    shard: Tensor = getattr(parameter, "ds_tensor", parameter)
    return shard


@torch.no_grad()
def with_reference(engine: Engine, weights: WeightsCopy, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """Add the reference's log-probabilities, `reference` [B, 2 P], to the next micro batches.

    All ranks call it together. No random numbers are drawn.

    Args:
        engine: Engine of the run, whose network the reference shares.
        weights: Copy of the weights that the run began with.
        batches: Micro batches of this data rank.
        count: Number of micro batches.
    """
    completed = []
    with weights.in_place(engine):
        for _ in range(count):
            batch = next(batches)
            sums = sums_of_batch(engine, {name: to_device(field, engine.device) for name, field in batch.items()})
            completed.append({**batch, "reference": sums.view(len(sums), ANSWERS_PER_PAIR * sums.shape[1])})
    return iter(completed)
