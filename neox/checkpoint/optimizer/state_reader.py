"""Reader of an optimizer's state and the fp32 weights in a checkpoint: by parameter, at any degrees."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox.architecture import VOCABULARY, LayerPlan, ParameterSpec
from neox.checkpoint.gpt_neox.optimizer_state import WRITER, divided_keys, gpt_neox_layout, group_counts, stage_order
from neox.checkpoint.gpt_neox.row_order import FUSED
from neox.checkpoint.optimizer.file_formats import FP32, Key, RankFiles, StageState, open_stage, parse_name, read_order
from neox.checkpoint.weights.reader import CheckpointReader
from neox.checkpoint.weights.shards import fit_vocabulary, joined_shape, mean_of_copies, merge
from neox.checkpoint.weights.tensor_files import load_file
from neox.checkpoint_files.manifest import is_unfetched
from neox.checkpoint_files.names import parse_mp_rank_file, parse_optimizer_file
from neox.config.sections.optimizer_table import OPTIMIZERS
from neox.errors import CheckpointError
from neox.parallel import shard


class _ModelRank:
    """State of one model rank, which is opened when it is first read."""

    def __init__(self, opener: Callable[[], StageState]) -> None:
        self._opener = opener

    @property
    def is_open(self) -> bool:
        """Whether it has been read."""
        return "state" in vars(self)

    def open(self) -> None:
        """Open the state now. Raises CheckpointError if there is none."""
        assert self.state is not None

    @cached_property
    def state(self) -> StageState:
        """The state. Raises CheckpointError if there is none."""
        return self._opener()


class OptimizerReader:
    """The optimizer's state of a checkpoint that this program or gpt-neox wrote, readable at any degrees.

    Only the files that hold what is read are opened: those of the pipeline stages and, if the checkpoint has the same
    tensor degree, of the tensor rank and the data ranks that have the elements. gpt-neox's files and those with experts
    are opened for all data ranks of a stage.

    Args:
        path: The checkpoint.
        layers: Layers of the network that reads.
        near: Place of the reader among its data ranks, from 0 to below 1, which is asked for first.
        gpt_neox_date: As of `CheckpointReader`.

    Attributes:
        optimizer: The optimizer that wrote it.
        scaler: fp16's loss scaler (`cur_scale`, ...); None for other precisions.
        layout: Degrees with which it was written.
        client_state: Model rank 0's counters and schedule.

    Raises:
        CheckpointError: If there is no optimizer state, or a file is missing.
    """

    def __init__(
        self, path: Path, layers: LayerPlan, near: float = 0.0, *, gpt_neox_date: datetime.date | None = None
    ) -> None:
        self.path = path
        self.layers = layers
        self._weights = CheckpointReader(path, layers, gpt_neox_date=gpt_neox_date)
        self.client_state = self._weights.client_state
        self.layout = saved_layout(path, self.client_state)
        self.optimizer = OPTIMIZERS[self.layout["optimizer"]]
        self._by_gpt_neox = WRITER in self.layout
        if self._by_gpt_neox and layers.architecture.num_experts:
            raise CheckpointError(
                f"{path}: the optimizer's states of gpt-neox's experts are not read, because it divides their "
                "gradients by the number of tensor ranks; set no_load_optim to start all states at zero"
            )
        self._stage_of: dict[Key, int] = {}
        self._near = near
        self._stages = self._find_stages()
        self.scaler = _loss_scaler(path) if self.layout["precision"] == "fp16" else None

    @cached_property
    def step(self) -> float:
        """The optimizer's counter; 0 if it has none."""
        for stage in self._stages:
            for rank in stage:
                if rank.is_open:
                    return float(rank.state.step)
        return float(self._stages[0][0].state.step)

    def names(self, index: int, name: str) -> frozenset[str]:
        """Return the names of the states of a parameter; none before the first step."""
        key = self._known(index, name)
        ranks = self._stages[self._stage_of[key]]
        chosen = next((rank for rank in ranks if rank.is_open), ranks[0])
        return chosen.state.names(key)

    def check_has(self, keys: Iterable[Key]) -> None:
        """Raise CheckpointError if the optimizer has no state of one of these parameters: it was frozen, or is new."""
        missing = sorted(set(keys) - self._stage_of.keys())
        if missing:
            layer, name = missing[0]
            raise CheckpointError(
                f"{self.path}: no optimizer state for {len(missing)} parameters that this run trains, such as layer "
                f"{layer} {name}: they were frozen when it was saved, or are new. Set no_load_optim to start all "
                "states at zero, or keep them frozen (parameter_groups)"
            )

    def full(self, index: int, name: str, state: str) -> Tensor:
        """Return a full parameter's fp32 weights (`FP32`) or a state, the vocabulary fitted to the plan's padding."""
        spec = self._spec(index, name)
        parts = self._parts(self._known(index, name), state)
        if parts is None:
            return self._weights.full(index, name).float()
        wanted: tuple[int, ...] | None = spec.shape
        axis = None  # a state may hold a number for each row or column only
        if state != FP32:
            kind = self.optimizer.state(state)
            wanted = kind.shape(spec.shape)
            axis = kind.axis
        if axis is not None:
            full = parts[0]
        elif spec.partition_dim is None:
            full = mean_of_copies(parts)
            if state == FP32:
                self._weights.remember_mean(index, name, parts)
        else:
            full = merge(spec, parts)
        if name in VOCABULARY and not axis:
            full = fit_vocabulary(spec, full, self._weights.args.get("vocab_size"))
        if tuple(full.shape) != wanted or (axis is not None and len(parts) > 1):
            raise CheckpointError(
                f"{self.path}: optimizer state of layer {index} {name} ({state}) has shape {list(full.shape)} on "
                f"{len(parts)} tensor ranks, this model's is {list(wanted or ())}; it is of another model"
            )
        return full

    def shard(self, index: int, name: str, state: str, tp_rank: int, tp_size: int) -> Tensor:
        """Return tensor rank `tp_rank`'s part of `full` at degree `tp_size`. Only the needed files are read."""
        spec = self._spec(index, name)
        parts = self._parts(self._known(index, name), state)
        if parts is None:
            return self._weights.shard(index, name, tp_rank, tp_size).float()
        if state != FP32 and self.optimizer.state(state).axis is not None:
            return self.full(index, name, state)
        if spec.partition_dim is None and tp_size == len(parts) and tuple(parts[tp_rank].shape) == spec.shape:
            return parts[tp_rank]  # a rank's own copy, as of the weights
        if spec.partition_dim is None or joined_shape(spec, parts) != spec.shape:
            return shard(self.full(index, name, state), spec, tp_rank, tp_size)
        return merge(spec, parts, spec.ranges(tp_rank, tp_size))

    def elements(self, index: int, name: str, state: str, rank: tuple[int, int], part: tuple[int, int]) -> Tensor:
        """Return elements of the flattened result of `shard`.

        Only the files that hold them are read if the checkpoint has the same tensor degree.

        Args:
            index: Index of the layer.
            name: Name of the parameter in the layer.
            state: Name of the state, or `FP32`; a state of the parameter's shape.
            rank: Tensor rank and tensor degree of the reader.
            part: First element and number of elements, above 0.
        """
        tp_rank, tp_size = rank
        first, length = part
        key = self._known(index, name)
        stages = self._stages[self._stage_of[key]]
        spec = self._spec(index, name)
        is_stored_so = tp_size == len(stages) and self._stored_shape(key, tp_size) == spec.shard_shape(tp_size)
        # gpt-neox's tensor ranks each own a summed bias: `shard` adds them up.
        is_sum = spec.summed_in_neox and self._by_gpt_neox
        is_reordered = name.startswith(FUSED) and self._weights.row_order != "blocks"
        if is_stored_so and not is_sum and not is_reordered:
            found = stages[tp_rank].state.elements(key, state, first, length)
            if found is not None:
                return found
        return self.shard(index, name, state, tp_rank, tp_size).reshape(-1)[first : first + length]

    def note_averages(self) -> None:
        """Log which replicated parameters were read as the mean of copies that differ."""
        self._weights.note_averages()

    def _known(self, index: int, name: str) -> Key:
        """Return the key of a parameter. Raises CheckpointError if the optimizer has no such parameter."""
        key = Key(index, name)
        self.check_has([key])
        return key

    def _parts(self, key: Key, state: str) -> list[Tensor] | None:
        """Return one tensor per tensor rank of the files; None if the layer files hold the fp32 weights."""
        parts = []
        for stage in self._stages[self._stage_of[key]]:
            part = stage.state.get(key, state)
            if part is None:
                return None
            parts.append(part)
        if self._by_gpt_neox and state == FP32 and len(parts) > 1 and self._spec(*key).summed_in_neox:
            return [torch.stack(parts).sum(0)]  # each rank owns a bias; their gradients and moments are equal
        if state != FP32 and self.optimizer.state(state).axis is not None:
            return parts  # of this program, which has one order
        return self._weights.in_this_order(key.name, parts)

    def _spec(self, index: int, name: str) -> ParameterSpec:
        return self._weights.spec(index, name)

    def _find_stages(self) -> list[list[_ModelRank]]:
        """Return what opens the state of each tensor rank of each stage, and note which stage holds which parameter."""
        pp = int(self.layout["pp"])
        tp = int(self.layout["mp"])
        clients, partitions = _files(self.path, pp * tp, int(self.layout["dp"]))
        stages: list[list[_ModelRank]] = []
        for stage in range(pp):
            ranks: list[_ModelRank] = []
            for tp_rank in range(tp):
                model_rank = stage * tp + tp_rank
                client = load_file(clients[model_rank])
                files = partitions.get(model_rank, [])
                if self._by_gpt_neox:
                    order = self._gpt_neox_order(stage, files)
                else:
                    order = read_order(clients[model_rank], client)
                shapes = {key: self._stored_shape(key, tp) for key in order}
                experts = [key for key in order if self._spec(*key).experts]
                rank_files = RankFiles(files, self._near)
                opener = partial(open_stage, clients[model_rank], client, rank_files, shapes, self.optimizer, experts)
                ranks.append(_ModelRank(opener))
                if not files:
                    ranks[-1].open()
            stages.append(ranks)
            for key in shapes:  # a tied embedding is on the first stage and, as a copy, on the last
                self._stage_of.setdefault(key, stage)
        return stages

    def _gpt_neox_order(self, stage: int, files: Sequence[Path]) -> list[Key]:
        """Return the parameters of a stage's optimizer that gpt-neox wrote, in its order."""
        if files:
            states = [load_file(file)["optimizer_state_dict"] for file in files]
            return list(map(parse_name, divided_keys(files[0], states)))
        counts = group_counts(self.path, int(self.layout["pp"]), int(self.layout["mp"]))
        return stage_order(self.path, stage, counts, self._weights)

    def _stored_shape(self, key: Key, tp_size: int) -> tuple[int, ...]:
        """Return the shape of a parameter on a tensor rank of the files."""
        if key.name in VOCABULARY:  # its padding may differ from the plan's
            return tuple(self._weights.parts(*key)[0].shape)
        return self._spec(*key).shard_shape(tp_size)


def saved_layout(path: Path, client_state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the layout in which a checkpoint's optimizer state was written. For gpt-neox's files it is derived.

    Raises:
        CheckpointError: If the state cannot be read.
    """
    layout = client_state.get("layout")
    if isinstance(layout, Mapping):
        return {"optimizer": "adam", **layout}  # older versions had no other optimizer and did not name it
    return gpt_neox_layout(path)


def _files(path: Path, model_ranks: int, data_ranks: int) -> tuple[dict[int, Path], dict[int, list[Path]]]:
    """Find the files of every model rank.

    Returns:
        The client state file of each model rank, and its optimizer files in the order of the data ranks.

    Raises:
        CheckpointError: If a file is missing.
    """
    clients: dict[int, Path] = {}
    partitions: dict[int, dict[int, Path]] = {}
    for file in path.iterdir():
        model_rank = parse_mp_rank_file(file.name)
        optimizer_file = parse_optimizer_file(file.name)
        if model_rank is not None:
            clients[model_rank] = file
        elif optimizer_file is not None:
            partitions.setdefault(optimizer_file.mp_rank, {})[optimizer_file.dp_rank] = file
    missing = []
    for model_rank in range(model_ranks):
        if model_rank not in clients:
            missing.append(f"client state of model rank {model_rank}")
        if partitions:
            gaps = sorted(set(range(data_ranks)) - partitions.get(model_rank, {}).keys())
            missing.extend(f"optimizer state of model rank {model_rank}, data rank {rank}" for rank in gaps)
    if missing:
        raise CheckpointError(f"{path}: missing {', '.join(missing)}")
    in_order = {}
    for model_rank, files in partitions.items():
        in_order[model_rank] = [file for _, file in sorted(files.items())]
    return clients, in_order


def _loss_scaler(path: Path) -> dict[str, Any]:
    """Return the attributes of fp16's loss scaler. Raises CheckpointError if there are none."""
    for state in _optimizer_states(path):
        values = state
        if state.get("loss_scaler") is not None:
            values = vars(state["loss_scaler"])
        found = {}
        for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
            if values.get(name) is not None:
                found[name] = values[name]
        return found
    raise CheckpointError(f"{path}: no loss scale in its optimizer state")


def _optimizer_states(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the optimizer states of all files: first those of data ranks, then those in `mp_rank` files."""
    files = sorted(path.iterdir(), key=lambda file: (is_unfetched(file), file))  # any rank's will do
    for file in files:
        if parse_optimizer_file(file.name) is not None:
            yield load_file(file)["optimizer_state_dict"]
    for file in files:
        if parse_mp_rank_file(file.name) is not None:
            state = load_file(file).get("optimizer")
            if state is not None:
                yield state
