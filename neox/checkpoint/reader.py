"""Reading a checkpoint's weights at any tensor-parallel degree, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from neox.architecture import LayerPlan, ParameterSpec
from neox.checkpoint.identity import ARGS, MODEL
from neox.checkpoint.joining import (
    VOCABULARY,
    OnDrift,
    fit_vocabulary,
    join,
    join_range,
    joined_shape,
    shard,
    shard_range,
    spec_without_plan,
)
from neox.checkpoint.names import layer_file, parse_mp_rank_file, parse_step_directory
from neox.checkpoint.reading import load_file
from neox.checkpoint.source import open_source
from neox.errors import CheckpointError

# What DeepSpeed itself puts beside the client state.
_DEEPSPEED_KEYS = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "ds_config"}
    | {"frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names", "ds_version"}
)


class CheckpointReader:
    """The weights and the client state in one `global_stepN` directory.

    Understands NeoX's layer files (v2.0 and later names) and one-stage `mp_rank` files. Tensors are memory-mapped and
    only one layer's files are open at a time, so read layer by layer. Raises CheckpointError for what is missing,
    broken or does not fit `layers`.

    layers: the model that reads; None to look at a checkpoint whose model is unknown (shapes then decide).
    on_drift: what to do when replicated parameters differ between tensor ranks.
    """

    def __init__(self, path: str | Path, layers: LayerPlan | None = None, *, on_drift: OnDrift = "refuse") -> None:
        self.path = Path(path)
        self.layers = layers
        self._on_drift: OnDrift = on_drift
        self._source = open_source(self.path)
        self._open: tuple[int, list[Mapping[str, Tensor]]] | None = None
        if layers is not None:
            self._check_layers(layers)

    @property
    def tp_size(self) -> int:
        """Tensor-parallel degree of the files."""
        return self._source.tp_size

    @property
    def indices(self) -> tuple[int, ...]:
        """Layers that have weights, in NeoX's numbering, ascending."""
        return tuple(index for index in self._source.indices if self.names(index))

    @cached_property
    def pp_size(self) -> int | None:
        """Pipeline degree of the files, None where no `mp_rank` file tells."""
        ranks = [r for p in self.path.iterdir() if (r := parse_mp_rank_file(p.name)) is not None]
        return len(ranks) // self.tp_size if ranks else None

    @cached_property
    def client_state(self) -> Mapping[str, Any]:
        """Counters, `args`, RNG states: what the run stored beside the weights (model rank 0's); may be empty."""
        paths = [p for p in self.path.iterdir() if parse_mp_rank_file(p.name) == 0]
        if not paths:
            return {}
        state = load_file(paths[0])
        return {key: value for key, value in state.items() if key not in _DEEPSPEED_KEYS}

    @property
    def args(self) -> Mapping[str, Any]:
        """The model's settings under NeoX's names, as far as the run stored them."""
        stored = (self.client_state.get(key) for key in (ARGS, MODEL))
        return {name: value for part in stored if isinstance(part, Mapping) for name, value in part.items()}

    @property
    def iteration(self) -> int:
        """Completed steps, from the client state or else the directory's name; CheckpointError where neither tells."""
        for key in ("iteration", "global_steps"):
            if isinstance(value := self.client_state.get(key), int):
                return value
        if (step := parse_step_directory(self.path.resolve().name)) is not None:
            return step
        raise CheckpointError(f"{self.path}: neither its client state nor its name tells the iteration")

    @property
    def iteration_or_none(self) -> int | None:
        """`iteration`, or None where nothing tells it (a directory that was renamed and has no client state)."""
        try:
            return self.iteration
        except CheckpointError:
            return None

    def names(self, index: int) -> tuple[str, ...]:
        """Names of the parameters stored for layer `index`."""
        return tuple(self._states(index)[0])

    def parts(self, index: int, name: str) -> tuple[Tensor, ...]:
        """The stored tensors of one parameter, one per tensor rank, memory-mapped."""
        states = self._states(index)
        if any(name not in state for state in states):
            raise CheckpointError(
                f"{self.path}: layer {index} has no `{name}`; it holds {', '.join(states[0]) or 'nothing'}"
            )
        return tuple(state[name] for state in states)

    def spec(self, index: int, name: str) -> ParameterSpec:
        """The parameter's specification: the plan's, or guessed where no plan was given."""
        if self.layers is not None and index < len(self.layers):
            for spec in self.layers[index].parameters:
                if spec.name == name:
                    return spec
        hidden = None
        if name == "final_linear.weight":
            hidden = self.parts(0, "word_embeddings.weight")[0].shape[1]
        return spec_without_plan(name, self.parts(index, name)[0].shape, self.tp_size, hidden_size=hidden)

    def full(self, index: int, name: str) -> Tensor:
        """The whole parameter: the tensor ranks joined, the vocabulary fitted to the plan's padding.

        May be a view of the mapped file: clone before writing into it.
        """
        spec = self.spec(index, name)
        where = str(self.path / layer_file(index, 0))
        full = join(spec, self.parts(index, name), where=where, on_drift=self._on_drift)
        if self.layers is None:
            return full
        if name in VOCABULARY:
            full = fit_vocabulary(spec, full, self.args.get("vocab_size"))
        if tuple(full.shape) != spec.shape:
            self._wrong_shape(index, spec, full)
        return full

    def shard(self, index: int, name: str, tp_rank: int, tp_size: int) -> Tensor:
        """Tensor rank `tp_rank`'s part at degree `tp_size`, whatever degree the files have.

        A `summed_in_neox` bias is the whole sum on every rank. Only the parts that are needed are read.
        """
        spec = self.spec(index, name)
        parts = self.parts(index, name)
        if spec.partition_dim is None or joined_shape(spec, parts) != spec.shape:  # another padding, or another model
            return shard(spec, self.full(index, name), tp_rank, tp_size)
        return join_range(spec, parts, *shard_range(spec, tp_rank, tp_size))

    def layer_shard(self, index: int, tp_rank: int, tp_size: int) -> dict[str, Tensor]:
        """All of the plan's parameters of one layer for one tensor rank: what its `load_state_dict` takes."""
        if self.layers is None:
            raise CheckpointError(f"{self.path}: a layer plan is needed to know what layer {index} should hold")
        return {p.name: self.shard(index, p.name, tp_rank, tp_size) for p in self.layers[index].parameters}

    def shape(self, index: int, name: str) -> tuple[int, ...]:
        """Shape of the parameter over all tensor ranks, as stored (no change of padding)."""
        return joined_shape(self.spec(index, name), self.parts(index, name))

    def row_blocks(self, index: int, name: str, max_bytes: int = 1 << 23) -> Iterator[Tensor]:
        """The parameter as stored, in blocks of rows of at most about `max_bytes`: joins without ever holding it whole.

        A vector comes as one block.
        """
        spec, parts = self.spec(index, name), self.parts(index, name)
        if spec.partition_dim is None or parts[0].dim() == 1:
            yield join(spec, parts, where=str(self.path / layer_file(index, 0)), on_drift=self._on_drift)
            return
        row_bytes = parts[0][0].numel() * parts[0].element_size() * (len(parts) if spec.partition_dim == 1 else 1)
        step = max(1, max_bytes // max(1, row_bytes))
        groups = [(part,) for part in parts] if spec.partition_dim == 0 else [parts]
        for group in groups:
            for start in range(0, group[0].shape[0], step):
                rows = [part[start : start + step] for part in group]
                yield rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def release(self) -> None:
        """Close the open layer's files once its tensors are gone; pages read so far stop counting as memory used."""
        self._open = None

    def items(self) -> Iterator[tuple[int, str]]:
        """(layer index, parameter name) of everything stored, in order."""
        for index in self._source.indices:
            for name in self.names(index):
                yield index, name

    def _wrong_shape(self, index: int, spec: ParameterSpec, found: Tensor) -> NoReturn:
        raise CheckpointError(
            f"{self.path / layer_file(index, 0)}: {spec.name} has shape {list(found.shape)}, this model's is "
            f"{list(spec.shape)} over all tensor ranks; the checkpoint is of another model"
        )

    def _states(self, index: int) -> list[Mapping[str, Tensor]]:
        if self._open is None or self._open[0] != index:
            self._open = None  # drop the old mapping first: its pages count as this process's memory
            if index not in self._source.indices:
                return [{} for _ in range(self.tp_size)]
            self._open = (index, [self._source.state(index, rank) for rank in range(self.tp_size)])
        return self._open[1]

    def _check_layers(self, layers: LayerPlan) -> None:
        network = layers.architecture
        wanted = {layer.index for layer in layers.weight_layers}
        stored = set(self._source.indices)
        if missing := sorted(wanted - stored):
            files = ", ".join(layer_file(index, 0) for index in missing)
            last = max(stored) if stored else None
            head = "with a tied head" if network.tie_word_embeddings else "and a head of its own"
            raise CheckpointError(
                f"{self.path}: no weights for layers {missing} ({files}); the model has {network.num_layers} blocks "
                f"{head}, the checkpoint's last layer is {last}"
            )
        extra = [index for index in sorted(stored - wanted) if self.names(index)]
        if (
            network.tie_word_embeddings
            and extra == [len(layers) - 1]
            and self.names(extra[0]) == ("word_embeddings.weight",)
        ):
            return  # a tied head's copy of the embedding
        if extra:
            raise CheckpointError(
                f"{self.path}: has weights for layers {extra} that a model of {network.num_layers} blocks "
                f"({'tied' if network.tie_word_embeddings else 'untied'} head) does not have; it is of another model"
            )
