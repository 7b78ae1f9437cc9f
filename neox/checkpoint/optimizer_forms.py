"""The forms in which DeepSpeed's files hold AdamW's state for one model rank.

Whole parameters (no ZeRO), whole fp32 copies beside them (fp16 or bf16 without ZeRO), flat partitions cut over data
ranks (ZeRO 1 and 2, bf16's pipeline optimizer), and parameters each cut over data ranks (ZeRO 3).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from neox.checkpoint.reading import load_file
from neox.errors import CheckpointError

Kind = Literal["fp32", "exp_avg", "exp_avg_sq"]
ORDER = "optimizer_order"

_NAME = re.compile(r"^(?:module\.)?(?:sequential\.)?(\d+)\.(.+)$")
_TIED = re.compile(r"^(?:module\.)?tied_modules\.[^.]+\.(.+)$")


class Key(NamedTuple):
    """A parameter: its layer's index and its name inside the layer."""

    layer: int
    name: str


class StageState(Protocol):
    """The optimizer's state of one model rank (one pipeline stage, one tensor rank).

    step: Adam's counter.
    """

    step: float

    def get(self, key: Key, kind: Kind) -> Tensor | None:
        """A parameter's fp32 weights or a moment on this tensor rank, in its shape; None where the weights have no
        fp32 copy because they are fp32 themselves."""
        ...


def read_order(client_file: Path, client: Mapping[str, Any]) -> list[Key]:
    """The parameters in a model rank's optimizer, in its order. Raises CheckpointError if the file does not say."""
    order = client.get(ORDER)
    if order is None:
        raise CheckpointError(f"{client_file}: does not say which parameters its optimizer state belongs to ({ORDER})")
    return [Key(int(index), str(name)) for group in order for index, name in group]


def open_stage(
    client_file: Path, client: Mapping[str, Any], files: Sequence[Path], shapes: Mapping[Key, tuple[int, ...]]
) -> StageState:
    """Open the optimizer's state of one model rank.

    files: one per data rank, none where the state is whole in the client state's file. shapes: of this rank's
    parameters on its tensor rank, in the optimizer's order. Raises CheckpointError where there is no state.
    """
    if not files:
        if client.get("optimizer") is None:
            raise CheckpointError(
                f"{client_file.parent} was saved without the optimizer's state (no_save_optim); set no_load_optim"
            )
        return WholeState(client["optimizer"], shapes)
    states = [load_file(file)["optimizer_state_dict"] for file in files]
    if "fp32_flat_groups" in states[0]:
        return ParameterPartitions(states, shapes)
    return FlatPartitions(states, shapes)


class WholeState:
    """Whole parameters in the `mp_rank` file: torch's own state dict, with or without fp32 copies of the weights."""

    def __init__(self, state: Mapping[str, Any], shapes: Mapping[Key, tuple[int, ...]]) -> None:
        inner = state.get("optimizer_state_dict", state)
        numbers = [number for group in inner["param_groups"] for number in group["params"]]
        masters = [tensor for group in state["fp32_groups"] for tensor in group] if "fp32_groups" in state else None
        self._state = {key: inner["state"][number] for key, number in zip(shapes, numbers, strict=True)}
        self._masters = dict(zip(shapes, masters, strict=True)) if masters is not None else None
        self.step = float(next(iter(self._state.values()))["step"])

    def get(self, key: Key, kind: Kind) -> Tensor | None:
        if kind != "fp32":
            moment: Tensor = self._state[key][kind]
            return moment
        return None if self._masters is None else self._masters[key]


class FlatPartitions:
    """ZeRO 1 and 2, and bf16 with pipeline stages: each group's parameters in one flat tensor, cut over data ranks.

    A parameter lies in one piece per data rank that holds some of it; the files say where.
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
        self.step = float(_moments(states[0])[0]["step"])

    def get(self, key: Key, kind: Kind) -> Tensor | None:
        pieces = [
            self._flat(rank, group, kind)[start : start + length] for rank, group, start, length in self._pieces[key]
        ]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).reshape(self._shapes[key])

    def _flat(self, rank: int, group: int, kind: Kind) -> Tensor:
        state = self._states[rank]
        flat: Tensor = (
            state["single_partition_of_fp32_groups"][group] if kind == "fp32" else _moments(state)[group][kind]
        )
        return flat


class ParameterPartitions:
    """ZeRO 3: every parameter cut over data ranks (padded to equal parts), a rank's parts in flat tensors."""

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
        self.step = float(states[0]["optimizer_state_dict"]["state"][0]["step"])

    def get(self, key: Key, kind: Kind) -> Tensor | None:
        flat, start, part = self._where[key]
        parts = [self._flat(state, flat, kind)[start : start + part] for state in self._states]
        shape = self._shapes[key]
        return torch.cat(parts)[: torch.Size(shape).numel()].reshape(shape)

    def _flat(self, state: Mapping[str, Any], flat: int, kind: Kind) -> Tensor:
        found: Tensor = (
            state["fp32_flat_groups"][flat] if kind == "fp32" else state["optimizer_state_dict"]["state"][flat][kind]
        )
        return found


def parse_name(name: str) -> Key:
    """Layer and name of a parameter as DeepSpeed's modules name it (`sequential.3.x`, `3.x`, `tied_modules.T.x`)."""
    if match := _TIED.match(name):
        return Key(0, match[1])
    match = _NAME.match(name)
    if match is None:
        raise CheckpointError(f"optimizer state names a parameter {name!r} that no layer has")
    return Key(int(match[1]), match[2])


def _moments(state: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
    found: Mapping[int, Mapping[str, Any]] = state["base_optimizer_state"]["state"]
    return found
