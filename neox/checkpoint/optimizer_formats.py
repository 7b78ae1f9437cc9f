"""Formats in which DeepSpeed's files hold an optimizer's state for one model rank.

Whole parameters (no ZeRO), whole fp32 copies beside them (fp16 or bf16 without ZeRO), flat partitions split over data
ranks (ZeRO 1 and 2, bf16's pipeline optimizer), and parameters each split over data ranks (ZeRO 3).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from neox.checkpoint.names import canonical_parameter
from neox.checkpoint.tensor_files import load_file
from neox.config.sections.optimizer_table import BLOCK, OPTIMIZERS, SCALES, VALUES, OptimizerKind, optimizer_of_states
from neox.errors import CheckpointError

FP32 = "fp32"
"""Name of the fp32 weights, beside those of states."""
ORDER = "optimizer_order"

_NAME = re.compile(r"^(?:module\.)?(?:sequential\.)?(\d+)\.(.+)$")
_TIED = re.compile(r"^(?:module\.)?tied_modules\.[^.]+\.(.+)$")


class Key(NamedTuple):
    """A parameter: its layer's index and its name inside the layer."""

    layer: int
    name: str


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

        None if there is no fp32 copy because the weights are fp32 themselves.
        """
        ...

    def elements(self, key: Key, name: str, first: int, length: int) -> Tensor | None:
        """Return elements [first, first + length) of the flattened result of `get`; reads only these."""
        ...


def read_order(client_file: Path, client: Mapping[str, Any]) -> list[Key]:
    """Return the parameters of a model rank's optimizer, in its order. Raises CheckpointError if unknown."""
    order = client.get(ORDER)
    if order is None:
        raise CheckpointError(f"{client_file}: does not say which parameters its optimizer state belongs to ({ORDER})")
    return [Key(int(index), str(name)) for group in order for index, name in group]


def open_stage(
    client_file: Path,
    client: Mapping[str, Any],
    files: Sequence[Path],
    shapes: Mapping[Key, tuple[int, ...]],
    optimizer: OptimizerKind,
) -> StageState:
    """Open the optimizer's state of one model rank.

    Args:
        client_file: The `mp_rank` file.
        client: Its content.
        files: One per data rank; none if the state is whole in the client state's file.
        shapes: Shapes of this rank's parameters on its tensor rank, in the optimizer's order.
        optimizer: The optimizer that wrote the state.

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
        return ParameterPartitions(states, shapes)
    return FlatPartitions(states, shapes)


class WholeState:
    """Whole parameters in the `mp_rank` file: torch's own state dict, with or without fp32 copies of the weights."""

    def __init__(
        self, state: Mapping[str, Any], shapes: Mapping[Key, tuple[int, ...]], optimizer: OptimizerKind
    ) -> None:
        inner = state.get("optimizer_state_dict", state)
        numbers = [number for group in inner["param_groups"] for number in group["params"]]
        masters = [tensor for group in state["fp32_groups"] for tensor in group] if "fp32_groups" in state else None
        self._state = {key: inner["state"].get(number, {}) for key, number in zip(shapes, numbers, strict=True)}
        self._masters = dict(zip(shapes, masters, strict=True)) if masters is not None else None
        self.step = steps_taken(inner)
        for key, saved in self._state.items():
            for name in _tensors(saved):
                shape = tuple(saved[name].shape)
                if shape != optimizer.state(name).shape(tuple(shapes[key])):
                    raise CheckpointError(
                        f"optimizer state of layer {key.layer} {key.name} ({name}) has shape {list(shape)}, the "
                        f"parameter {list(shapes[key])}: it belongs to another one; set no_load_optim"
                    )

    def names(self, key: Key) -> frozenset[str]:
        """Return the names of a parameter's states."""
        return _tensors(self._state[key])

    def get(self, key: Key, name: str) -> Tensor | None:
        """Return a parameter's fp32 weights or a state."""
        if name == FP32:
            return None if self._masters is None else self._masters[key]
        kept = self._state[key]
        return _numbers(kept, name, 0, kept[name].numel()).reshape(kept[name].shape)

    def elements(self, key: Key, name: str, first: int, length: int) -> Tensor | None:
        """Return some elements of a parameter's fp32 weights or of a state."""
        if name == FP32:
            return None if self._masters is None else self._masters[key].reshape(-1)[first : first + length]
        return _numbers(self._state[key], name, first, length)


class FlatPartitions:
    """ZeRO 1 and 2, and bf16 with pipeline stages: each group's parameters in one flat tensor, split over data ranks.

    A parameter has one piece on each data rank that holds a part of it; the files say at which position.
    """

    def __init__(self, states: Sequence[Mapping[str, Any]], shapes: Mapping[Key, tuple[int, ...]]) -> None:
        self._states = states
        self._shapes = shapes
        self._pieces: dict[Key, list[tuple[int, int, int, int]]] = {}  # data rank, group, start, length
        for rank, state in enumerate(states):
            for group, fragments in enumerate(state["param_slice_mappings"]):
                for name, fragment in fragments.items():
                    piece = (rank, group, fragment.start, fragment.numel)
                    self._pieces.setdefault(parse_name(name), []).append(piece)
        self.step = steps_taken(states[0]["base_optimizer_state"])

    def names(self, key: Key) -> frozenset[str]:
        """Return the names of a parameter's states."""
        rank, group, *_ = self._pieces[key][0]
        return _tensors(self._states[rank]["base_optimizer_state"]["state"].get(group, {}))

    def get(self, key: Key, name: str) -> Tensor | None:
        """Return a parameter's fp32 weights or a state."""
        shape = self._shapes[key]
        return self.elements(key, name, 0, torch.Size(shape).numel()).reshape(shape)

    def elements(self, key: Key, name: str, first: int, length: int) -> Tensor:
        """Return some elements of a parameter's fp32 weights or of a state."""
        pieces = self._pieces[key]
        found = []
        for number, begin, count in overlaps([piece[3] for piece in pieces], first, length):
            rank, group, start, _ = pieces[number]
            found.append(self._piece(rank, group, name, start + begin, count))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _piece(self, rank: int, group: int, name: str, start: int, length: int) -> Tensor:
        state = self._states[rank]
        fp32: Tensor = state["single_partition_of_fp32_groups"][group][start : start + length]
        return fp32 if name == FP32 else _state_piece(state["base_optimizer_state"], group, name, start, fp32)


class ParameterPartitions:
    """ZeRO 3: every parameter split over data ranks (padded to equal parts), a rank's parts in flat tensors."""

    def __init__(self, states: Sequence[Mapping[str, Any]], shapes: Mapping[Key, tuple[int, ...]]) -> None:
        self._states = states
        self._shapes = shapes
        self._where: dict[Key, tuple[int, int, int]] = {}  # flat tensor, start, length of a rank's part
        flats = [flat.numel() for flat in states[0]["fp32_flat_groups"]]
        ends = list(accumulate(flats))
        position = 0
        for key, shape in self._shapes.items():
            part = -(-torch.Size(shape).numel() // len(states))
            flat = next(i for i, end in enumerate(ends) if position < end)
            self._where[key] = (flat, position - (ends[flat] - flats[flat]), part)
            position += part
        self.step = steps_taken(states[0]["optimizer_state_dict"])

    def names(self, key: Key) -> frozenset[str]:
        """Return the names of a parameter's states."""
        return _tensors(self._states[0]["optimizer_state_dict"]["state"].get(self._where[key][0], {}))

    def get(self, key: Key, name: str) -> Tensor | None:
        """Return a parameter's fp32 weights or a state."""
        shape = self._shapes[key]
        return self.elements(key, name, 0, torch.Size(shape).numel()).reshape(shape)

    def elements(self, key: Key, name: str, first: int, length: int) -> Tensor:
        """Return some elements of a parameter's fp32 weights or of a state."""
        flat, start, part = self._where[key]
        found = []
        for rank, begin, count in overlaps([part] * len(self._states), first, length):
            found.append(self._piece(self._states[rank], flat, name, start + begin, count))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _piece(self, state: Mapping[str, Any], flat: int, name: str, start: int, length: int) -> Tensor:
        fp32: Tensor = state["fp32_flat_groups"][flat][start : start + length]
        return fp32 if name == FP32 else _state_piece(state["optimizer_state_dict"], flat, name, start, fp32)


def overlaps(lengths: Sequence[int], first: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield which parts of neighbouring pieces make up a range of their concatenation.

    Args:
        lengths: Lengths of the pieces.
        first: First element of the range.
        length: Length of the range, above 0.

    Yields:
        Number of a piece, first element in the piece, number of elements.
    """
    offset = 0
    for number, piece in enumerate(lengths):
        begin = max(first, offset)
        end = min(first + length, offset + piece)
        if begin < end:
            yield number, begin - offset, end - begin
        offset += piece


def parse_name(name: str) -> Key:
    """Parse a parameter's name in DeepSpeed's modules (`sequential.3.x`, `3.x`, `tied_modules.T.x`)."""
    if match := _TIED.match(name):
        return Key(0, canonical_parameter(match[1]))
    match = _NAME.match(name)
    if match is None:
        raise CheckpointError(f"optimizer state names a parameter {name!r} that no layer has")
    return Key(int(match[1]), canonical_parameter(match[2]))


def steps_taken(state: Mapping[str, Any]) -> float:
    """Return the counter in an optimizer's state dict; 0 before the first step, and for an optimizer without.

    torch counts by parameter, DeepSpeed's own Adam by group or, in some versions, by the last parameter alone: the
    largest counter is the right one. gpt-neox's MADGRAD has one for all, `k`.

    Raises:
        CheckpointError: If Adam's is missing.
    """
    states = [value for value in state["state"].values() if isinstance(value, Mapping)]
    holders = [*states, *state.get("param_groups", ())]
    steps = [float(holder["step"]) for holder in holders if "step" in holder]
    steps += [float(state["state"]["k"])] if "k" in state["state"] else []
    names = {name for value in states for name in _tensors(value)}
    found = optimizer_of_states(names)
    if names and not steps and found is not None and OPTIMIZERS[found].counts_steps:
        raise CheckpointError("the optimizer's state does not say how many steps it has taken; set no_load_optim")
    return max(steps, default=0.0)


def _tensors(state: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the states that are kept for a parameter, without the counter of steps."""
    names = {name for name, value in state.items() if isinstance(value, Tensor) and name != "step"}
    return frozenset(name for name in names if not name.endswith((SCALES, VALUES)))


def _state_piece(state: Mapping[str, Any], number: int, name: str, start: int, fp32: Tensor) -> Tensor:
    """Return a part of a state of the tensor of that number, as long as `fp32`; zeros before the first step."""
    kept = state["state"].get(number, {})
    return _numbers(kept, name, start, fp32.numel()) if name in kept else torch.zeros_like(fp32)


def _numbers(kept: Mapping[str, Tensor], name: str, start: int, length: int) -> Tensor:
    """Return a part of a flattened state.

    The numbers of a state of 8 bits are products of two fp32 numbers. They are returned in fp64, which holds them
    exactly, so that `neox.optim` finds the same codes and scales again.
    """
    stored = kept[name].reshape(-1)[start : start + length]
    scales = kept.get(name + SCALES)
    if scales is None:
        return stored
    blocks = torch.arange(start, start + stored.numel()) // BLOCK
    return kept[name + VALUES][stored.int()].double() * scales[blocks].double()
