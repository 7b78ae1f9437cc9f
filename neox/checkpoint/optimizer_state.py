"""Reading Adam's state and the fp32 weights out of DeepSpeed's files, parameter by parameter, whatever the degrees.

DeepSpeed writes them in four forms: whole parameters (no ZeRO), whole fp32 copies beside them (fp16 or bf16 without
ZeRO), flat partitions cut over data ranks (ZeRO 1 and 2, bf16's pipeline optimizer), and parameters each cut over data
ranks (ZeRO 3). Here each form is a `StageState` of one model rank; `OptimizerReader` joins them over tensor ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from neox.checkpoint.joining import VOCABULARY, fit_vocabulary, join_range, joined_shape, shard, shard_range
from neox.checkpoint.names import parse_mp_rank_file, parse_optimizer_file
from neox.checkpoint.reader import CheckpointReader
from neox.checkpoint.reading import load_file
from neox.config import LayerPlan, ParameterSpec
from neox.errors import CheckpointError

Kind = Literal["fp32", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, Kind] = ("exp_avg", "exp_avg_sq")
ORDER = "optimizer_order"

_NAME = re.compile(r"^(?:module\.)?(?:sequential\.)?(\d+)\.(.+)$")
_TIED = re.compile(r"^(?:module\.)?tied_modules\.[^.]+\.(.+)$")


class Key(NamedTuple):
    """A parameter: its layer's index and its name inside the layer."""

    index: int
    name: str


class StageState(Protocol):
    """The optimizer's state of one model rank (one pipeline stage, one tensor rank)."""

    step: float

    def keys(self) -> Sequence[Key]:
        """Parameters of this rank."""
        ...

    def get(self, key: Key, kind: Kind) -> Tensor | None:
        """A parameter's fp32 weights or a moment on this tensor rank, in its shape; None where the weights have no
        fp32 copy because they are fp32 themselves."""
        ...


class OptimizerReader:
    """The optimizer's state of a checkpoint that this program wrote, readable at any degrees.

    layers: the model that reads. Raises CheckpointError when there is no optimizer state, or a file is missing.

    step: Adam's counter. scaler: fp16's loss scaler (`cur_scale`, ...), None for other precisions.
    layout: the degrees it was written with. client_state: model rank 0's counters and schedule.
    """

    def __init__(self, path: Path, layers: LayerPlan) -> None:
        self.path = path
        self.layers = layers
        self._weights = CheckpointReader(path, layers)
        self.client_state = self._weights.client_state
        layout = self.client_state.get("layout")
        if not isinstance(layout, Mapping):
            raise CheckpointError(f"{path}: its optimizer state was not written by this program")
        self.layout: Mapping[str, Any] = layout
        self._stages = _open_stages(path, int(layout["pp"]), int(layout["mp"]), int(layout["dp"]))
        # A tied embedding is on the first stage and, as a copy, on the last.
        self._place: dict[Key, int] = {}
        for pp, ranks in reversed(list(enumerate(self._stages))):
            self._place |= dict.fromkeys(ranks[0].keys(), pp)
        self.step = float(self._stages[0][0].step)
        self.scaler = _scaler(path) if layout["precision"] == "fp16" else None

    def full(self, index: int, name: str, kind: Kind) -> Tensor:
        """The whole parameter's fp32 weights or moment, the vocabulary fitted to the plan's padding."""
        spec, parts = self._spec(index, name), self._parts(Key(index, name), kind)
        if parts is None:
            return self._weights.full(index, name).float()
        full = torch.cat(parts, spec.partition_dim) if spec.partition_dim is not None and len(parts) > 1 else parts[0]
        if name in VOCABULARY:
            full = fit_vocabulary(spec, full, self._weights.args.get("vocab_size"))
        if tuple(full.shape) != spec.shape:
            raise CheckpointError(
                f"{self.path}: optimizer state of layer {index} {name} has shape {list(full.shape)}, "
                f"this model's is {list(spec.shape)}; it is of another model"
            )
        return full

    def shard(self, index: int, name: str, kind: Kind, tp_rank: int, tp_size: int) -> Tensor:
        """Tensor rank `tp_rank`'s part of `full` at degree `tp_size`; reads no more than it needs."""
        spec, parts = self._spec(index, name), self._parts(Key(index, name), kind)
        if parts is None:
            return self._weights.shard(index, name, tp_rank, tp_size).float()
        if spec.partition_dim is None or joined_shape(spec, parts) != spec.shape:
            return shard(spec, self.full(index, name, kind), tp_rank, tp_size)
        return join_range(spec, parts, *shard_range(spec, tp_rank, tp_size))

    def _parts(self, key: Key, kind: Kind) -> list[Tensor] | None:
        """One tensor per tensor rank of the files; None where the layer files hold the fp32 weights."""
        if key not in self._place:
            raise CheckpointError(f"{self.path}: no optimizer state for layer {key.index} {key.name}")
        parts = [stage.get(key, kind) for stage in self._stages[self._place[key]]]
        return None if parts[0] is None else [part for part in parts if part is not None]

    def _spec(self, index: int, name: str) -> ParameterSpec:
        return self._weights.spec(index, name)


def _open_stages(path: Path, pp: int, mp: int, dp: int) -> list[list[StageState]]:
    """States by pipeline rank and tensor rank."""
    clients: dict[int, Path] = {}
    partitions: dict[int, dict[int, Path]] = {}
    for file in path.iterdir():
        if (rank := parse_mp_rank_file(file.name)) is not None:
            clients[rank] = file
        elif (parsed := parse_optimizer_file(file.name)) is not None:
            partitions.setdefault(parsed.mp_rank, {})[parsed.dp_rank] = file
    missing = [f"client state of model rank {rank}" for rank in range(pp * mp) if rank not in clients]
    missing += [
        f"optimizer state of data rank {d}, model rank {rank}"
        for rank in range(pp * mp)
        for d in range(dp)
        if partitions and d not in partitions.get(rank, {})
    ]
    if missing:
        raise CheckpointError(f"{path}: missing {', '.join(missing)}")
    return [
        [
            _open_stage(clients[p * mp + t], [f for _, f in sorted(partitions.get(p * mp + t, {}).items())])
            for t in range(mp)
        ]
        for p in range(pp)
    ]


def _open_stage(client_file: Path, files: list[Path]) -> StageState:
    client = load_file(client_file)
    if not files:
        if client.get("optimizer") is None:
            raise CheckpointError(
                f"{client_file.parent} was saved without the optimizer's state (no_save_optim); set no_load_optim"
            )
        return WholeState(client_file, client["optimizer"], client.get(ORDER))
    states = [load_file(file)["optimizer_state_dict"] for file in files]
    shapes = [{parse_name(n): tuple(s) for n, s in group.items()} for group in client["param_shapes"]]
    if "fp32_flat_groups" in states[0]:
        return ParameterPartitions(states, shapes)
    return FlatPartitions(states, shapes)


class WholeState:
    """Whole parameters in the `mp_rank` file: torch's own state dict, with or without fp32 copies of the weights."""

    def __init__(self, path: Path, state: Mapping[str, Any], order: Any) -> None:
        if order is None:
            raise CheckpointError(f"{path}: does not say which parameters its optimizer state belongs to ({ORDER})")
        inner = state.get("optimizer_state_dict", state)
        numbers = [number for group in inner["param_groups"] for number in group["params"]]
        names = [Key(int(index), str(name)) for group in order for index, name in group]
        masters = [tensor for group in state["fp32_groups"] for tensor in group] if "fp32_groups" in state else None
        self._state = {key: inner["state"][number] for key, number in zip(names, numbers, strict=True)}
        self._masters = dict(zip(names, masters, strict=True)) if masters is not None else None
        self.step = float(next(iter(self._state.values()))["step"])

    def keys(self) -> Sequence[Key]:
        return list(self._state)

    def get(self, key: Key, kind: Kind) -> Tensor | None:
        if kind != "fp32":
            moment: Tensor = self._state[key][kind]
            return moment
        return None if self._masters is None else self._masters[key]


class FlatPartitions:
    """ZeRO 1 and 2, and bf16 with pipeline stages: each group's parameters in one flat tensor, cut over data ranks.

    A parameter lies in one piece per data rank that holds some of it; the files say where.
    """

    def __init__(self, states: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[Key, tuple[int, ...]]]) -> None:
        self._states = states
        self._shapes = {key: shape for group in shapes for key, shape in group.items()}
        self._pieces: dict[Key, list[tuple[int, int, int, int]]] = {}  # data rank, group, start, length
        for rank, state in enumerate(states):
            for group, fragments in enumerate(state["param_slice_mappings"]):
                for name, fragment in fragments.items():
                    piece = (rank, group, fragment.start, fragment.numel)
                    self._pieces.setdefault(parse_name(name), []).append(piece)
        self.step = float(_moments(states[0])[0]["step"])

    def keys(self) -> Sequence[Key]:
        return list(self._pieces)

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

    def __init__(self, states: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[Key, tuple[int, ...]]]) -> None:
        self._states = states
        self._shapes = {key: shape for group in shapes for key, shape in group.items()}
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

    def keys(self) -> Sequence[Key]:
        return list(self._where)

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


def _scaler(path: Path) -> dict[str, Any]:
    """Attributes of fp16's loss scaler, from wherever this form of optimizer keeps it."""
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    for state in _optimizer_states(path):
        found = state.get("loss_scaler")
        values = state if found is None else vars(found)
        return {name: values[name] for name in names if values.get(name) is not None}
    raise CheckpointError(f"{path}: no loss scale in its optimizer state")


def _optimizer_states(path: Path) -> Iterator[Mapping[str, Any]]:
    for file in sorted(path.iterdir()):
        if parse_optimizer_file(file.name) is not None:
            yield load_file(file)["optimizer_state_dict"]
    for file in sorted(path.iterdir()):
        if parse_mp_rank_file(file.name) is not None and (state := load_file(file).get("optimizer")) is not None:
            yield state
