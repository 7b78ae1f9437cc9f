"""Formats in which DeepSpeed's files hold an optimizer's state for one model rank.

Without ZeRO: whole parameters, and for fp16 and bf16 whole fp32 copies of the weights. With ZeRO 1 and 2, and with
bf16's pipeline optimizer: flat tensors of many parameters, split over data ranks. With ZeRO 3: each parameter split
over data ranks, a rank's parts in flat tensors. `round_robin_gradients` changes the order of parameters in the flat
tensors of ZeRO 1 and 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from neox.checkpoint.weights.shards import overlaps
from neox.checkpoint.weights.tensor_files import load_file
from neox.checkpoint_files.names import canonical_parameter
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


def read_groups(client: Mapping[str, Any]) -> list[list[Key]]:
    """Return the parameters of a model rank's optimizer by group; no groups if the file does not say."""
    groups = []
    for group in client.get(ORDER) or ():
        groups.append([Key(int(index), str(name)) for index, name in group])
    return groups


class RankFiles:
    """The files of a model rank's data ranks; each is opened when it is first needed.

    Args:
        files: One file per data rank.
        near: Place of the reader among its own data ranks, from 0 to below 1. The file at the same place is taken if
            any would do.
    """

    def __init__(self, files: Sequence[Path], near: float = 0.0) -> None:
        self._files = files
        self._states: dict[int, Mapping[str, Any]] = {}
        self.nearest = int(near * len(files))

    def __len__(self) -> int:
        """Return the number of data ranks."""
        return len(self._files)

    def state(self, rank: int) -> Mapping[str, Any]:
        """Return the optimizer's state in the file of a data rank. Raises CheckpointError if it cannot be read."""
        if rank not in self._states:
            self._states[rank] = load_file(self._files[rank])["optimizer_state_dict"]
        return self._states[rank]

    def outwards(self, rank: int) -> list[int]:
        """Return all data ranks, those next to `rank` first."""
        return sorted(range(len(self)), key=lambda other: abs(other - rank))


def open_stage(
    client_file: Path,
    client: Mapping[str, Any],
    files: RankFiles,
    shapes: Shapes,
    optimizer: OptimizerKind,
    experts: Collection[Key] = (),
) -> StageState:
    """Open the optimizer's state of one model rank.

    Args:
        client_file: The `mp_rank` file.
        client: Content of the `mp_rank` file.
        files: The files of the data ranks; none if the `mp_rank` file holds the whole state.
        shapes: Shapes of the model rank's parameters.
        optimizer: The optimizer that wrote the state.
        experts: Parameters that hold experts.

    Raises:
        CheckpointError: If there is no state.
    """
    if not len(files):
        if client.get("optimizer") is None:
            raise CheckpointError(
                f"{client_file.parent} was saved without the optimizer's state (no_save_optim); set no_load_optim"
            )
        return WholeState(client["optimizer"], shapes, optimizer)
    layout = client.get("layout")
    ep_size = int(layout.get("ep", 1)) if isinstance(layout, Mapping) else 1
    if "fp32_flat_groups" in files.state(files.nearest):
        return zero3_state(files, shapes, experts, ep_size)
    groups = read_groups(client)
    if _is_round_robin(client, files):
        return round_robin_state(files, groups or groups_in_files(files), shapes, experts, ep_size)
    if groups and not experts:
        return OrderedState(files, groups, shapes)
    return zero12_state(files, shapes, experts, ep_size)


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
        return state_numbers(self._states[key], name, 0, stored.numel()).reshape(stored.shape)

    def elements(self, key: Key, name: str, first: int, length: int) -> Tensor | None:
        """Return some elements of a parameter's fp32 weights or of a state."""
        if name != FP32:
            return state_numbers(self._states[key], name, first, length)
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
        tensors: Function that returns the tensors of a data rank.
        pieces: Pieces of each parameter, in their order. The last one may end with padding.
        shapes: Shapes of the parameters.
        step: The optimizer's counter.
        nearest: Data rank whose file is open.
    """

    def __init__(
        self,
        tensors: Callable[[int], RankTensors],
        pieces: Mapping[Key, Sequence[Piece]],
        shapes: Shapes,
        step: float,
        nearest: int = 0,
    ) -> None:
        self.step = step
        self._tensors = tensors
        self._pieces = pieces
        self._shapes = shapes
        self._nearest = nearest

    def names(self, key: Key) -> frozenset[str]:
        """Return the names of a parameter's states."""
        pieces = self._pieces[key]
        chosen = pieces[0]
        for piece in pieces:
            if piece.rank == self._nearest:
                chosen = piece
        return state_names(self._tensors(chosen.rank).states.get(chosen.flat, {}))

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
            found.append(_part(self._tensors(piece.rank), piece.flat, name, piece.start + begin, count))
        return found[0] if len(found) == 1 else torch.cat(found)


def _part(tensors: RankTensors, flat: int, name: str, start: int, length: int) -> Tensor:
    """Return a part of one flat tensor; zeros for a state before the first step."""
    weights = tensors.weights[flat][start : start + length]
    if name == FP32:
        return weights
    states = tensors.states.get(flat, {})
    if name not in states:
        return torch.zeros_like(weights)
    return state_numbers(states, name, start, length)


class OrderedState:
    """The state in files of ZeRO 1 and 2 whose order is known; only files that are needed are opened.

    A group's parameters stand one after another in one flat tensor, whose parts of equal size the data ranks hold:

        group           | a       | b                 | c    |      the parts of data ranks 0, 1 and 2 have 12 numbers
        data ranks      | 0              | 1             | 2
                        start of b in part 0: 8, its length there: 4; in part 1: 0 and 12; in part 2: 0 and 2

    The files say where in its part a rank has a piece of a parameter. Where in the parameter the piece begins follows.

    Args:
        files: The files of the data ranks.
        groups: Parameters of each group, in order.
        shapes: Shapes of the parameters.
    """

    def __init__(self, files: RankFiles, groups: Sequence[Sequence[Key]], shapes: Shapes) -> None:
        self._files = files
        self._shapes = shapes
        self.step = steps_taken(files.state(files.nearest)["base_optimizer_state"])
        self._group_of: dict[Key, int] = {}
        self._start_of: dict[Key, int] = {}
        self._places: dict[int, dict[Key, Piece]] = {}
        for number, group in enumerate(groups):
            start = 0
            for key in group:
                self._group_of[key] = number
                self._start_of[key] = start
                start += prod(shapes[key])

    def names(self, key: Key) -> frozenset[str]:
        """Return the names of a parameter's states."""
        return state_names(self._tensors(self._files.nearest).states.get(self._group_of[key], {}))

    def get(self, key: Key, name: str) -> Tensor:
        """Return a parameter's fp32 weights or a state."""
        shape = self._shapes[key]
        return self.elements(key, name, 0, prod(shape)).reshape(shape)

    def elements(self, key: Key, name: str, first: int, length: int) -> Tensor:
        """Return some elements of a parameter's fp32 weights or of a state."""
        found = []
        position = first
        while position < first + length:
            piece, begin = self._piece_with(key, position)
            skipped = position - begin
            count = min(piece.length - skipped, first + length - position)
            found.append(_part(self._tensors(piece.rank), piece.flat, name, piece.start + skipped, count))
            position += count
        return found[0] if len(found) == 1 else torch.cat(found)

    def _piece_with(self, key: Key, position: int) -> tuple[Piece, int]:
        """Return the piece that holds an element of a parameter, and the element with which it begins.

        Its data rank follows from the order of parameters. If that is wrong, the files next to it are opened.
        """
        part = self._tensors(self._files.nearest).weights[self._group_of[key]].numel()
        likely = min((self._start_of[key] + position) // max(1, part), len(self._files) - 1)
        for rank in self._files.outwards(likely):
            piece = self._pieces(rank).get(key)
            if piece is None:
                continue
            begin = self._first_element(piece, key)
            if begin <= position < begin + piece.length:
                return piece, begin
        raise CheckpointError(
            f"no file of a data rank holds element {position:,} of layer {key.layer} {key.name}; the checkpoint was "
            "not written or copied completely, use another one"
        )

    def _first_element(self, piece: Piece, key: Key) -> int:
        """Return the element of a parameter with which a piece begins."""
        size = prod(self._shapes[key])
        if piece.start > 0 or piece.length == size or piece.rank == 0:
            return 0
        if piece.length < self._tensors(piece.rank).weights[piece.flat].numel():
            return size - piece.length  # another parameter, or padding, follows in the part
        before = self._pieces(piece.rank - 1).get(key)
        if before is None:
            return 0
        return self._first_element(before, key) + before.length

    def _pieces(self, rank: int) -> Mapping[Key, Piece]:
        """Return the pieces of parameters that a data rank has."""
        if rank not in self._places:
            places = {}
            for piece_key, piece in _pieces_of(self._files.state(rank), rank):
                places[piece_key] = piece
            self._places[rank] = places
        return self._places[rank]

    def _tensors(self, rank: int) -> RankTensors:
        return _zero12_tensors(self._files.state(rank))


def _zero12_tensors(state: Mapping[str, Any]) -> RankTensors:
    return RankTensors(state["single_partition_of_fp32_groups"], state["base_optimizer_state"]["state"])


def _pieces_of(state: Mapping[str, Any], rank: int) -> Iterator[tuple[Key, Piece]]:
    """Yield the pieces of parameters in the file of a data rank of ZeRO 1 and 2."""
    for group, fragments in enumerate(state["param_slice_mappings"]):
        for name, fragment in fragments.items():
            yield parse_name(name), Piece(rank, group, fragment.start, fragment.numel)


def zero12_state(files: RankFiles, shapes: Shapes, experts: Collection[Key] = (), ep_size: int = 1) -> PartitionedState:
    """Return the state in files of ZeRO 1 and 2, and of bf16 with pipeline stages; all files are opened.

    A group's parameters stand one after another in one flat tensor, which is split over data ranks. The files say where
    in it each parameter is.

    Args:
        files: The files of the data ranks.
        shapes: Shapes of the parameters.
        experts: Parameters that hold experts.
        ep_size: Number of neighbouring data ranks that divided them.
    """
    pieces: dict[Key, list[Piece]] = {}
    for rank in range(len(files)):
        for key, piece in _pieces_of(files.state(rank), rank):
            pieces.setdefault(key, []).append(piece)
    for key in experts:
        if key in pieces:  # every ep-th rank has pieces of the same experts
            pieces[key].sort(key=lambda piece: (piece.rank % ep_size, piece.rank))
    step = steps_taken(files.state(0)["base_optimizer_state"])
    return PartitionedState(lambda rank: _zero12_tensors(files.state(rank)), pieces, shapes, step)


def _is_round_robin(client: Mapping[str, Any], files: RankFiles) -> bool:
    """Return whether ZeRO 1 or 2 reordered the parameters of each group. bf16's own wrapper never does."""
    settings = client.get("ds_config")
    zero = settings.get("zero_optimization") if isinstance(settings, Mapping) else None
    asked = isinstance(zero, Mapping) and bool(zero.get("round_robin_gradients"))
    return asked and "zero_stage" in files.state(files.nearest)


def groups_in_files(files: RankFiles) -> list[list[Key]]:
    """Return the parameters of each group of gpt-neox in the original order, from the mappings of all data ranks."""
    groups: list[dict[Key, None]] = []
    for rank in range(len(files)):
        fragments = files.state(rank)["param_slice_mappings"]
        groups = groups or [{} for _ in fragments]
        for group, names in zip(groups, fragments, strict=True):
            group.update(dict.fromkeys(map(parse_name, names)))
    return list(map(list, groups))


def round_robin_state(
    files: RankFiles,
    groups: Sequence[Sequence[Key]],
    shapes: Shapes,
    experts: Collection[Key] = (),
    ep_size: int = 1,
) -> PartitionedState:
    """Return the state in files of ZeRO 1 and 2 with `round_robin_gradients`; only needed files are opened.

    DeepSpeed deals the parameters of a group to its data ranks like cards, and flattens them hand by hand:

        group           | a | b | c | d | e |
        2 data ranks    | a | c | e | b | d |      then cut into two halves of equal size, wherever that is

    Its own mappings in the files ignore that order. So the places follow from the groups here.

    Args:
        files: The files of the data ranks.
        groups: Parameters of each group in the original order.
        shapes: Shapes of the parameters.
        experts: Parameters that hold experts.
        ep_size: Number of neighbouring data ranks that divided them.
    """
    nearest = files.state(files.nearest)
    weights = nearest["single_partition_of_fp32_groups"]
    pieces: dict[Key, list[Piece]] = {}
    for number, group in enumerate(groups):
        divided = ep_size if group[0] in experts else 1
        sharing = len(files) // divided  # data ranks that shard a parameter of the group
        size = weights[number].numel() + nearest["group_paddings"][number]  # the files leave out padding
        dealt = [key for hand in range(sharing) for key in group[hand::sharing]]
        start = 0
        for key in dealt:
            numel = prod(shapes[key]) // divided
            pieces[key] = []
            for first_rank in range(divided):
                position = start
                while position < start + numel:
                    rank, offset = divmod(position, size)
                    length = min(size - offset, start + numel - position)
                    pieces[key].append(Piece(first_rank + rank * divided, number, offset, length))
                    position += length
            start += numel
    step = steps_taken(nearest["base_optimizer_state"])
    return PartitionedState(lambda rank: _zero12_tensors(files.state(rank)), pieces, shapes, step, files.nearest)


def zero3_state(files: RankFiles, shapes: Shapes, experts: Collection[Key] = (), ep_size: int = 1) -> PartitionedState:
    """Return the state in files of ZeRO 3; only files that are needed are opened.

    Each parameter is padded and split into equal parts. A rank's parts stand one after another in its flat tensors. If
    data ranks divided experts, each split its own over the ranks with the same ones, which are every `ep_size`-th.

    Args:
        files: The files of the data ranks.
        shapes: Shapes of the parameters.
        experts: Parameters that hold experts.
        ep_size: Number of neighbouring data ranks that divided them.
    """

    def tensors(rank: int) -> RankTensors:
        state = files.state(rank)
        return RankTensors(state["fp32_flat_groups"], state["optimizer_state_dict"]["state"])

    sizes = list(map(Tensor.numel, tensors(files.nearest).weights))
    pieces: dict[Key, list[Piece]] = {}
    flat = 0
    start = 0
    for key, shape in shapes.items():
        while start >= sizes[flat]:  # this flat tensor is full
            start -= sizes[flat]
            flat += 1
        divided = ep_size if key in experts else 1
        own = prod(shape) // divided
        length = -(-own // (len(files) // divided))
        pieces[key] = []
        for part in range(divided):
            for number, rank in enumerate(range(part, len(files), divided)):
                without_padding = max(0, min(length, own - number * length))
                pieces[key].append(Piece(rank, flat, start, without_padding))
        start += length
    step = steps_taken(files.state(files.nearest)["optimizer_state_dict"])
    return PartitionedState(tensors, pieces, shapes, step, files.nearest)


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


def state_numbers(stored: Mapping[str, Tensor], name: str, start: int, length: int) -> Tensor:
    """Return a part of a flattened state.

    The numbers of a state of 8 bits are products of two fp32 numbers. They are returned in fp64, which holds them
    exactly, so that `neox.optim` finds the same codes and scales again.
    """
    part = stored[name].reshape(-1)[start : start + length]
    scales = stored.get(name + SCALES)
    if scales is None:
        return part
    blocks = torch.arange(start, start + part.numel(), device=part.device) // BLOCK
    return stored[name + VALUES][part.int()].double() * scales[blocks].double()
