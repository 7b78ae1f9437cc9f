"""Specification of one parameter: name, shape, tensor-parallel split, initialisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import NamedTuple


@dataclass(frozen=True)
class Constant:
    """Initial values that are all the same."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Initial values of a normal distribution around 0."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """Initial values of a uniform distribution."""

    low: float
    high: float


@dataclass(frozen=True)
class LogUniform:
    """Initial values whose exponentials are uniformly distributed (decay rates)."""

    low: float
    high: float


@dataclass(frozen=True)
class LogCounts:
    """Initial values log 1, log 2, log 3, ... along the last dimension (decay rates of the elements of a state)."""


@dataclass(frozen=True)
class StepSizes:
    """Initial values whose softplus is between two bounds, uniformly distributed in its logarithm (steps in time)."""

    low: float
    high: float


@dataclass(frozen=True)
class ByChannel:
    """Initial values that a formula gives for each channel of each block.

    Attributes:
        value: (channel, number of channels, block, number of blocks) -> the value. Channels are the elements of the
            whole parameter, one after another; both numbers count from 0.
    """

    value: Callable[[int, int, int, int], float]


class FromKey(StrEnum):
    """Initial values that the configuration chooses, by the key that does."""

    METHOD = "init_method"
    OUTPUT_METHOD = "output_layer_init_method"  # of weights that write into the residual stream
    PROMPT_RANGE = "soft_prompt_tuning.init_range"


InitialValues = Constant | Normal | Uniform | LogUniform | LogCounts | StepSizes | ByChannel | FromKey
ZEROS = Constant(0.0)
ONES = Constant(1.0)


class MatrixRows(NamedTuple):
    """A matrix among the rows of a parameter.

    Attributes:
        first: Its first row; the rows of a stack of experts are counted through.
        rows: Number of rows.
        columns: Number of columns.
        turns: Number of heads whose queries, keys and values take turns, which are then three matrices; 0 for one.
    """

    first: int
    rows: int
    columns: int
    turns: int


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of one layer.

    Attributes:
        name: Name inside its layer, as in NeoX's layer files (`attention.query_key_value.weight`).
        shape: Full (unsplit) shape.
        partition_dim: Dimension split over tensor ranks; None if every tensor rank holds the same copy.
        init: Initial values.
        summed_in_neox: In gpt-neox's own files the full value is the sum of the tensor ranks' values (row-parallel
            biases under `gpt_j_residual`). Here there is one value, written on rank 0 with zeros elsewhere.
        sections: Sizes along `partition_dim` of parts that are split separately (queries, keys and values; halves of
            a gated activation): a rank's part is its share of each, one after another. () for one section.
        turns: Number of heads whose queries, keys and values take turns in the rows of the first section; 0 if they do
            not.
        trained: Whether it has gradients. Others keep their initial or loaded values.
        trained_rows: First row and number of the rows that are trained; None for all.
        lr_factor: Factor of the learning rate that `parameter_groups` gives it.
        weight_decay: Weight decay that `parameter_groups` gives it; None for the network's rule.
        stays_fp32: Whether it is fp32 in every precision, in files, too: rounding would lose steps, or change decays.
        of_norm: It scales or shifts elements, whatever its shape.
        of_recurrence: It belongs to what a mixer computes between its two projections, not to a linear layer that
            tensor ranks divide.
        looked_up: Its rows are chosen by a number, not multiplied with a vector.
        of_whole_linear: It is the weight of a linear layer that every tensor rank computes whole, and that can have an
            adapter.
        shared_with: Index of the layer that owns it, if this layer uses another one's parameter. Every pipeline stage
            and every layer's file holds a copy.
        experts: Number of experts whose weights it holds, one after another along dimension 0; 0 for other parameters.
        active_experts: Number of these that compute one token.
    """

    name: str
    shape: tuple[int, ...]
    partition_dim: int | None = None
    init: InitialValues = FromKey.METHOD
    summed_in_neox: bool = False
    sections: tuple[int, ...] = ()
    turns: int = 0
    trained: bool = True
    trained_rows: tuple[int, int] | None = None
    lr_factor: float = 1.0
    weight_decay: float | None = None
    stays_fp32: bool = False
    of_norm: bool = False
    of_recurrence: bool = False
    looked_up: bool = False
    of_whole_linear: bool = False
    shared_with: int | None = None
    experts: int = 0
    active_experts: int = 0

    def __post_init__(self) -> None:
        """Check the sections."""
        if self.sections:
            assert self.partition_dim is not None, self
            assert sum(self.sections) == self.shape[self.partition_dim], self

    @property
    def numel(self) -> int:
        """Number of elements over all tensor ranks."""
        return prod(self.shape)

    @property
    def active_numel(self) -> int:
        """Number of elements that one token is computed with."""
        if not self.experts:
            return self.numel
        return self.numel // self.experts * self.active_experts

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix of a product, or a stack of them, to which weight decay applies."""
        return len(self.shape) > 1 and not self.of_norm

    def matrices(self, *, split: bool) -> Iterator[MatrixRows]:
        """Yield the matrices whose rows stand one after another in a matrix or a stack of experts.

        Args:
            split: Whether queries, keys, values and the two halves of a gated MLP are matrices of their own. Otherwise
                each is one matrix with what it is stored with. Each expert always is one.
        """
        *_, rows, columns = self.shape
        is_cut = split and self.partition_dim == len(self.shape) - 2
        sizes = self.sections if self.sections and is_cut else (rows,)
        first = 0
        for _ in range(max(1, self.experts)):
            for number, size in enumerate(sizes):
                yield MatrixRows(first, size, columns, self.turns if split and number == 0 else 0)
                first += size

    def is_divisible(self, tp_size: int) -> bool:
        """Return whether every one of `tp_size` tensor ranks gets an equal part, of each section."""
        if self.partition_dim is None:
            return True
        return all(size % tp_size == 0 for size in self._split_sizes)

    @property
    def _split_sizes(self) -> tuple[int, ...]:
        """Sizes along `partition_dim` of the parts that are split separately."""
        assert self.partition_dim is not None, self
        return self.sections or (self.shape[self.partition_dim],)

    def ranges(self, tp_rank: int, tp_size: int) -> list[tuple[int, int]]:
        """Return (start, length) along `partition_dim` of what a tensor rank holds, one after another.

        Raises:
            ValueError: The parameter cannot be divided over so many ranks.
        """
        if not self.is_divisible(tp_size):
            sizes = " + ".join(map(str, self._split_sizes))
            raise ValueError(f"{self.name} ({sizes}) is not divisible by the tensor-parallel degree ({tp_size})")
        found = []
        section_start = 0
        for size in self._split_sizes:
            length = size // tp_size
            found.append((section_start + tp_rank * length, length))
            section_start += size
        return found

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """Return the shape on one of `tp_size` tensor ranks."""
        if self.partition_dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.partition_dim] //= tp_size
        return tuple(shape)

    def shard_spec(self, tp_size: int) -> ParameterSpec:
        """Return the parameter that one of `tp_size` tensor ranks holds, with its share of sections and turns."""
        if self.partition_dim is None:
            return self
        sections = tuple(size // tp_size for size in self.sections)
        return replace(self, shape=self.shard_shape(tp_size), sections=sections, turns=self.turns // tp_size)

    def shard_numel(self, tp_size: int) -> int:
        """Return the number of elements on one of `tp_size` tensor ranks."""
        if self.partition_dim is None:
            return self.numel
        return self.numel // tp_size


def in_module(module: str, parameters: Iterable[ParameterSpec]) -> tuple[ParameterSpec, ...]:
    """Return parameters with the name of their module in front of their own."""
    return tuple(replace(spec, name=f"{module}.{spec.name}") for spec in parameters)
