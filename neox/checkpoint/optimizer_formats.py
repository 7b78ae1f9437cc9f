"""Formats in which DeepSpeed's files hold an optimizer's state for one model rank.

Without ZeRO: whole parameters, and for fp16 and bf16 whole fp32 copies of the weights. With ZeRO 1 and 2, and with
bf16's pipeline optimizer: flat tensors of many parameters, split over data ranks. With ZeRO 3: each parameter split
over data ranks, a rank's parts in flat tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from neox.checkpoint.names import canonical_parameter
from neox.checkpoint.reshard import overlaps
from neox.checkpoint.tensor_files import load_file
from neox.config.sections.optimizer_kind import BLOCK, SCALES, VALUES, OptimizerKind
from neox.config.sections.optimizer_table import OPTIMIZERS, optimizer_of_states
from neox.errors import CheckpointError

FP32 = "fp32"
"""Name of the fp32 weights, next to the names of states."""
ORDER = "optimizer_order"
"""Key of the client state that names the parameters of the optimizer."""

_NAME = re.compile(r"^(?:module\.)?(?:sequential\.)?(\d+)\.(.+)$")
_TIED = re.compile(r"^(?:module\.)?tied_modules\.[^.]+\.(.+)$")


class Key(NamedTuple):
    """A parameter: its layer's index and its name inside the layer."""

    layer: int
    name: str


Shapes = Mapping[Key, tuple[int, ...]]
"""Shapes of a model rank's parameters on its tensor rank, in the optimizer's order."""


class StageState(Protocol):
    """The optimizer's state of one model rank (one pipeline stage, one tensor rank).

    Attributes:
        step: The optimizer's counter; 0 if it has none.
    """

    step: float

    def names(self, key: Key) -> frozenset[str]:
        """Return the names of the states that are stored for a parameter."""
        ...

    def get(self, key: Key, name: str) -> Tensor | None:
        """Return a parameter's fp32 weights or a state on this tensor rank, in its shape.

        None if there is no fp32 copy, because the weights are fp32 themselves.
        """
        ...

    def elements(self, key: Key, name: str, first: int, length: int) -> Tensor | None:
        """Return elements [first, first + length) of the flattened result of `get`. Only these are read."""
        ...


def read_order(client_file: Path, client: Mapping[str, Any]) -> list[Key]:
    """Return the parameters of a model rank's optimizer, in its order. Raises CheckpointError if unknown."""
    order = client.get(ORDER)
    if order is None:
        raise CheckpointError(f"{client_file}: does not say which parameters its optimizer state belongs to ({ORDER})")
    keys = []
    for group in order:
        for index, name in group:
            keys.append(Key(int(index), str(name)))
    return keys


def open_stage(
    client_file: Path,
    client: Mapping[str, Any],
    files: Sequence[Path],
    shapes: Shapes,
    optimizer: OptimizerKind,
    experts: Collection[Key] = (),
) -> StageState:
    """Open the optimizer's state of one model rank.

    Args:
        client_file: The `mp_rank` file.
        client: Content of the `mp_rank` file.
        files: One file per data rank; none if the `mp_rank` file holds the whole state.
        shapes: Shapes of the model rank's parameters.
        optimizer: The optimizer that wrote the state.
        experts: Parameters that hold experts.

    Raises:
        CheckpointError: If there is no state.
    """
    if not files:
        if client.get("optimizer") is None:
            raise CheckpointError(
                f"{client_file.parent} was saved without the optimizer's state (no_save_optim); set no_load_optim"
            )
        return WholeState(client["optimizer"], shapes, optimizer)
    states = [load_file(file)["optimizer_state_dict"] for file in files]
    if "fp32_flat_groups" in states[0]:
        return zero3_state(states, shapes)
    layout = client.get("layout")
    ep_size = int(layout.get("ep", 1)) if isinstance(layout, Mapping) else 1
    return zero12_state(states, shapes, experts, ep_size)


class WholeState:
    """Whole parameters in the `mp_rank` file: torch's own state dict, with or without fp32 copies of the weights."""

    def __init__(self, state: Mapping[str, Any], shapes: Shapes, optimizer: OptimizerKind) -> None:
        inner = state.get("optimizer_state_dict", state)
        numbers: list[int] = []
        for group in inner["param_groups"]:
            numbers.extend(group["params"])
        self.step = steps_taken(inner)
        self._states: dict[Key, Mapping[str, Tensor]] = {}
        for key, number in zip(shapes, numbers, strict=True):
            self._states[key] = inner["state"].get(number, {})
            _check_shapes(key, self._states[key], shapes[key], optimizer)
        self._weights: dict[Key, Tensor] | None = None
        if "fp32_groups" in state:
            weights: list[Tensor] = []
            for tensors in state["fp32_groups"]:
                weights.extend(tensors)
            self._weights = dict(zip(shapes, weights, strict=True))

    def names(self, key: Key) -> frozenset[str]:
        """Return the names of a parameter's states."""
        return state_names(self._states[key])

    def get(self, key: Key, name: str) -> Tensor | None:
        """Return a parameter's fp32 weights or a state."""
        if name == FP32:
            return self._fp32(key)
        stored = self._states[key][name]
        return _numbers(self._states[key], name, 0, stored.numel()).reshape(stored.shape)

    def elements(self, key: Key, name: str, first: int, length: int) -> Tensor | None:
        """Return some elements of a parameter's fp32 weights or of a state."""
        if name != FP32:
            return _numbers(self._states[key], name, first, length)
        weights = self._fp32(key)
        if weights is None:
            return None
        return weights.reshape(-1)[first : first + length]

    def _fp32(self, key: Key) -> Tensor | None:
        if self._weights is None:
            return None
        return self._weights[key]


def _check_shapes(
    key: Key, states: Mapping[str, Tensor], parameter_shape: tuple[int, ...], optimizer: OptimizerKind
) -> None:
    """Raise CheckpointError if the states stored for a parameter are those of another parameter."""
    for name in state_names(states):
        shape = tuple(states[name].shape)
        if shape != optimizer.state(name).shape(tuple(parameter_shape)):
            raise CheckpointError(
                f"optimizer state of layer {key.layer} {key.name} ({name}) has shape {list(shape)}, the "
                f"parameter {list(parameter_shape)}: it belongs to another one; set no_load_optim"
            )


class RankTensors(NamedTuple):
    """The flat tensors of one data rank.

    Attributes:
        weights: fp32 weights.
        states: Number of a flat tensor -> its states by name.
    """

    weights: Sequence[Tensor]
    states: Mapping[int, Mapping[str, Tensor]]


class Piece(NamedTuple):
    """A part of a flattened parameter in a flat tensor.

    Attributes:
        rank: Data rank that holds it.
        flat: Number of its flat tensor.
        start: First element in the flat tensor.
        length: Number of elements.
    """

    rank: int
    flat: int
    start: int
    length: int


class PartitionedState:
    """Flat tensors over data ranks, in which each parameter consists of pieces.

    Args:
        ranks: Tensors of each data rank.
        pieces: Pieces of each parameter, in their order. The last one may end with padding.
        shapes: Shapes of the parameters.
        step: The optimizer's counter.
    """

    def __init__(
        self, ranks: Sequence[RankTensors], pieces: Mapping[Key, Sequence[Piece]], shapes: Shapes, step: float
    ) -> None:
        self.step = step
        self._ranks = ranks
        self._pieces = pieces
        self._shapes = shapes

    def names(self, key: Key) -> frozenset[str]:
        """Return the names of a parameter's states."""
        first = self._pieces[key][0]
        return state_names(self._ranks[first.rank].states.get(first.flat, {}))

    def get(self, key: Key, name: str) -> Tensor:
        """Return a parameter's fp32 weights or a state."""
        shape = self._shapes[key]
        return self.elements(key, name, 0, prod(shape)).reshape(shape)

    def elements(self, key: Key, name: str, first: int, length: int) -> Tensor:
        """Return some elements of a parameter's fp32 weights or of a state."""
        pieces = self._pieces[key]
        found = []
        for number, begin, count in overlaps([piece.length for piece in pieces], first, length):
            piece = pieces[number]
            found.append(self._part(piece.rank, piece.flat, name, piece.start + begin, count))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _part(self, rank: int, flat: int, name: str, start: int, length: int) -> Tensor:
        """Return a part of one flat tensor; zeros for a state before the first step."""
        weights = self._ranks[rank].weights[flat][start : start + length]
        if name == FP32:
            return weights
        states = self._ranks[rank].states.get(flat, {})
        if name not in states:
            return torch.zeros_like(weights)
        return _numbers(states, name, start, length)


def zero12_state(
    states: Sequence[Mapping[str, Any]], shapes: Shapes, experts: Collection[Key] = (), ep_size: int = 1
) -> PartitionedState:
    """Return the state in files of ZeRO 1 and 2, and of bf16 with pipeline stages.

    A group's parameters stand one after another in one flat tensor, which is split over data ranks. The files say where
    in it each parameter is.

    Args:
        states: Content of the file of each data rank.
        shapes: Shapes of the parameters.
        experts: Parameters that hold experts.
        ep_size: Number of neighbouring data ranks that divided them.
    """
    ranks = []
    pieces: dict[Key, list[Piece]] = {}
    for rank, state in enumerate(states):
        ranks.append(RankTensors(state["single_partition_of_fp32_groups"], state["base_optimizer_state"]["state"]))
        for group, fragments in enumerate(state["param_slice_mappings"]):
            for name, fragment in fragments.items():
                piece = Piece(rank, group, fragment.start, fragment.numel)
                pieces.setdefault(parse_name(name), []).append(piece)
    for key in experts:
        if key in pieces:  # every ep-th rank has pieces of the same experts
            pieces[key].sort(key=lambda piece: (piece.rank % ep_size, piece.rank))
    return PartitionedState(ranks, pieces, shapes, steps_taken(states[0]["base_optimizer_state"]))


def zero3_state(states: Sequence[Mapping[str, Any]], shapes: Shapes) -> PartitionedState:
    """Return the state in files of ZeRO 3.

    Each parameter is padded and split into equal parts. A rank's parts stand one after another in its flat tensors.

    Args:
        states: Content of the file of each data rank.
        shapes: Shapes of the parameters.
    """
    ranks = [RankTensors(state["fp32_flat_groups"], state["optimizer_state_dict"]["state"]) for state in states]
    sizes = list(map(Tensor.numel, ranks[0].weights))
    pieces: dict[Key, list[Piece]] = {}
    flat = 0
    start = 0
    for key, shape in shapes.items():
        while start >= sizes[flat]:  # this flat tensor is full
            start -= sizes[flat]
            flat += 1
        length = -(-prod(shape) // len(ranks))
        pieces[key] = [Piece(rank, flat, start, length) for rank in range(len(ranks))]
        start += length
    return PartitionedState(ranks, pieces, shapes, steps_taken(states[0]["optimizer_state_dict"]))


def parse_name(name: str) -> Key:
    """Parse a parameter's name in DeepSpeed's modules (`sequential.3.x`, `3.x`, `tied_modules.T.x`)."""
    match = _TIED.match(name)
    if match:
        return Key(0, canonical_parameter(match[1]))
    match = _NAME.match(name)
    if match is None:
        raise CheckpointError(f"optimizer state names a parameter {name!r} that no layer has")
    return Key(int(match[1]), canonical_parameter(match[2]))


def steps_taken(state: Mapping[str, Any]) -> float:
    """Return the counter in an optimizer's state dict; 0 before the first step, and for an optimizer without one.

    torch counts for each parameter. DeepSpeed's own Adam counts for each group, or in some versions only for the last
    parameter. The largest counter is the right one. gpt-neox's MADGRAD has one counter for all parameters, `k`.

    Raises:
        CheckpointError: If Adam's counter is missing.
    """
    states = [value for value in state["state"].values() if isinstance(value, Mapping)]
    counters = []
    for holder in (*states, *state.get("param_groups", ())):
        if "step" in holder:
            counters.append(float(holder["step"]))
    if "k" in state["state"]:
        counters.append(float(state["state"]["k"]))
    if counters:
        return max(counters)
    names: set[str] = set()
    for value in states:
        names |= state_names(value)
    optimizer = optimizer_of_states(names)
    if names and optimizer is not None and OPTIMIZERS[optimizer].counts_steps:
        raise CheckpointError("the optimizer's state does not say how many steps it has taken; set no_load_optim")
    return 0.0


def state_names(stored: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the states that are stored for a parameter, without the counter of steps."""
    names = set()
    for name, value in stored.items():
        if isinstance(value, Tensor) and name != "step" and not name.endswith((SCALES, VALUES)):
            names.add(name)
    return frozenset(names)


def _numbers(stored: Mapping[str, Tensor], name: str, start: int, length: int) -> Tensor:
    """Return a part of a flattened state.

    The numbers of a state of 8 bits are products of two fp32 numbers. They are returned in fp64, which holds them
    exactly, so that `neox.optim` finds the same codes and scales again.
    """
    part = stored[name].reshape(-1)[start : start + length]
    scales = stored.get(name + SCALES)
    if scales is None:
        return part
    blocks = torch.arange(start, start + part.numel()) // BLOCK
    return stored[name + VALUES][part.int()].double() * scales[blocks].double()
