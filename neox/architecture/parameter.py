"""Specification of one parameter: name, shape, tensor-parallel split, initialisation."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Initialization = Literal["weight", "output_weight", "ones", "zeros"]
"""How a parameter starts: drawn by `init_method`, drawn by `output_layer_init_method` (weights that write into the
residual), or constant."""


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of one layer.

    Attributes:
        name: Name inside its layer, as in NeoX's layer files (`attention.query_key_value.weight`).
        shape: Full (unsplit) shape.
        partition_dim: Dimension split over tensor ranks; None where every tensor rank holds the same copy.
        init: Initial values.
        summed_in_neox: In gpt-neox's own files the full value is the sum of the tensor ranks' values (row-parallel
            biases under `gpt_j_residual`). Here there is one value, written on rank 0 with zeros elsewhere.
    """

    name: str
    shape: tuple[int, ...]
    partition_dim: int | None = None
    init: Initialization = "weight"
    summed_in_neox: bool = False

    @property
    def numel(self) -> int:
        """Number of elements over all tensor ranks."""
        return prod(self.shape)

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """Return the shape on one of `tp_size` tensor ranks."""
        if self.partition_dim is None:
            return self.shape
        return tuple(n // tp_size if dim == self.partition_dim else n for dim, n in enumerate(self.shape))
