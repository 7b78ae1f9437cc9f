"""Reading a checkpoint's weights at any tensor-parallel degree, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from neox.architecture import ADAPTER, WORD_EMBEDDINGS, LayerPlan, Lora, ParameterSpec, adapter_parameters
from neox.checkpoint.identity import ARGS, MODEL
from neox.checkpoint.names import (
    layer_file,
    mp_rank_file,
    parse_mp_rank_file,
    parse_step_directory,
)
from neox.checkpoint.reshard import VOCABULARY, OnDrift, fit_vocabulary, join, joined_shape, merge, pieces_in_order
from neox.checkpoint.tensor_files import load_file
from neox.checkpoint.weight_files import open_source
from neox.errors import CheckpointError
from neox.parallel import shard

# What DeepSpeed itself puts beside the client state.
_DEEPSPEED_KEYS = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "ds_config"}
    | {"frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names", "ds_version"}
)


UNUSED_IN_NEOX = ("post_attention_layernorm.",)
"""Parameters that gpt-neox keeps beside one norm for both branches (`gpt_j_tied`), and never uses."""


class CheckpointReader:
    """The weights and the client state in one `global_stepN` directory.

    Reads NeoX's layer files (v2.0 and later names) and one-stage `mp_rank` files. Tensors are memory-mapped and only
    one layer's files are open at a time, so read layer by layer.

    Args:
        path: The directory.
        layers: Layers of the network that reads; None for a checkpoint of an unknown network, of which only stored
            parts can then be read.
            A plan without adapters reads weights to which the checkpoint's adapters have been added.
        on_drift: What to do if replicated parameters differ between tensor ranks.
        other_head: Whether the head may be tied on one side only, as in fine-tuning: an untied head that is not stored
            starts as the embedding, a stored one that is not wanted is left out. Adapters and a soft prompt
            may be missing.

    Attributes:
        path: The directory.
        layers: The network.
        new_layers: Indices of layers that it does not hold and that keep their initial values.

    Raises:
        CheckpointError: From every method, if something is missing, broken or does not fit `layers`.
    """

    def __init__(
        self,
        path: str | Path,
        layers: LayerPlan | None = None,
        *,
        on_drift: OnDrift = "refuse",
        other_head: bool = False,
    ) -> None:
        self.path = Path(path)
        self.layers = layers
        self._on_drift: OnDrift = on_drift
        self._source = open_source(self.path)
        self._open: tuple[int, list[Mapping[str, Tensor]]] | None = None
        self._head_from_embedding = False
        self._finetune = other_head
        self.new_layers: frozenset[int] = frozenset()
        if layers is not None:
            self._check_layers(layers, other_head)

    @property
    def tp_size(self) -> int:
        """Tensor-parallel degree of the files."""
        return self._source.tp_size

    @property
    def indices(self) -> tuple[int, ...]:
        """Layers that have weights, in NeoX's numbering, in ascending order."""
        return tuple(index for index in self._source.indices if self.names(index))

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding over all tensor ranks, padding included."""
        return sum(part.shape[0] for part in self.parts(0, "word_embeddings.weight"))

    @cached_property
    def pp_size(self) -> int | None:
        """Pipeline degree of the files; None without `mp_rank` files."""
        ranks = [r for p in self.path.iterdir() if (r := parse_mp_rank_file(p.name)) is not None]
        return len(ranks) // self.tp_size if ranks else None

    @cached_property
    def client_state(self) -> Mapping[str, Any]:
        """What model rank 0 stored beside the weights (counters, `args`, random states); may be empty."""
        paths = [p for p in self.path.iterdir() if parse_mp_rank_file(p.name) == 0]
        if not paths:
            return {}
        state = load_file(paths[0])
        return {key: value for key, value in state.items() if key not in _DEEPSPEED_KEYS}

    @property
    def args(self) -> Mapping[str, Any]:
        """The model's settings that the run stored, under NeoX's names."""
        stored = (self.client_state.get(key) for key in (ARGS, MODEL))
        return {name: value for part in stored if isinstance(part, Mapping) for name, value in part.items()}

    @property
    def iteration(self) -> int:
        """Completed steps, from the client state or the directory's name. Raises CheckpointError without both."""
        for key in ("iteration", "global_steps"):
            if isinstance(value := self.client_state.get(key), int):
                return value
        if (step := parse_step_directory(self.path.resolve().name)) is not None:
            return step
        raise CheckpointError(
            f"{self.path}: neither its client state nor its name gives the iteration; name it global_stepN"
        )

    @property
    def iteration_or_none(self) -> int | None:
        """`iteration`; None in a renamed directory without client state."""
        try:
            return self.iteration
        except CheckpointError:
            return None

    def names(self, index: int) -> tuple[str, ...]:
        """Return the names of the parameters stored for layer `index`."""
        merged = self.layers is not None and self.layers.lora is None
        return tuple(name for name in self._states(index)[0] if not (merged and ADAPTER in name))

    def parts(self, index: int, name: str) -> tuple[Tensor, ...]:
        """Return the stored tensors of one parameter, one per tensor rank, memory-mapped."""
        states = self._states(index)
        if any(name not in state for state in states):
            raise CheckpointError(
                f"{self.path}: layer {index} has no `{name}`; it holds {', '.join(states[0]) or 'nothing'}"
            )
        return tuple(state[name] for state in states)

    def spec(self, index: int, name: str) -> ParameterSpec:
        """Return the plan's specification of a parameter."""
        if self.layers is None:
            raise CheckpointError(f"{self.path}: the network is needed to know how layer {index} `{name}` is split")
        layer = self.layers[index]
        copied = () if layer.tied_to is None else self.layers[layer.tied_to].parameters  # a tied head may hold them
        for spec in (*layer.parameters, *copied):
            if spec.name == name:
                return spec
        raise CheckpointError(f"{self.path}: this network's layer {index} has no `{name}`")

    def full(self, index: int, name: str) -> Tensor:
        """Return the full parameter: tensor ranks joined, the vocabulary fitted to the plan's padding.

        The result may be a view of the mapped file: clone it before writing into it.
        """
        if self._is_embedding(index):
            return self.full(0, WORD_EMBEDDINGS)
        spec = self.spec(index, name)
        full = self._joined(index, spec)
        if name in VOCABULARY:
            full = fit_vocabulary(spec, full, self.args.get("vocab_size"))
        if tuple(full.shape) != spec.shape:
            self._wrong_shape(index, spec, full)
        change = self._adapter_product(index, spec)
        return full if change is None else (full.float() + change).to(full.dtype)

    def shard(self, index: int, name: str, tp_rank: int, tp_size: int) -> Tensor:
        """Return tensor rank `tp_rank`'s part at degree `tp_size`, for any degree of the files.

        A `summed_in_neox` bias is the whole sum on every rank. Only the parts that are needed are read.
        """
        spec = self.spec(index, name)
        if self._is_embedding(index):
            return shard(self.full(index, name), spec, tp_rank, tp_size)
        parts = self.parts(index, name)
        other_shape = joined_shape(spec, parts) != spec.shape  # another padding, or another model
        if spec.partition_dim is None or other_shape or self._adapters_of(index, spec):
            return shard(self.full(index, name), spec, tp_rank, tp_size)
        return merge(spec, parts, spec.ranges(tp_rank, tp_size))

    def layer_shard(self, index: int, tp_rank: int, tp_size: int) -> dict[str, Tensor]:
        """Return one layer's parameters for one tensor rank, by name."""
        if self.layers is None:
            raise CheckpointError(f"{self.path}: the network is needed to know what layer {index} holds")
        layer = self.layers[index]
        wanted = [p.name for p in layer.parameters]
        if self._finetune:
            wanted = [name for name in wanted if ADAPTER not in name or name in self.names(index)]
        unused = UNUSED_IN_NEOX if self.layers.architecture.residual == "parallel_one_norm" else ()
        unknown = {n for n in self.names(index) if ADAPTER not in n and not n.startswith(unused)} - {*wanted}
        if unknown and layer.kind == "block":  # a tied head may hold a copy of the embedding
            raise CheckpointError(
                f"{self.path / layer_file(index, 0)}: holds {', '.join(sorted(unknown))}, which this model does not "
                f"have in layer {index}; it is of another model"
            )
        return {name: self.shard(index, name, tp_rank, tp_size) for name in wanted}

    def shape(self, index: int, name: str) -> tuple[int, ...]:
        """Return the shape of the parameter over all tensor ranks as stored, with the stored padding."""
        return joined_shape(self.spec(index, name), self.parts(index, name))

    def row_blocks(self, index: int, name: str, max_bytes: int = 1 << 23) -> Iterator[Tensor]:
        """Yield the parameter as stored in blocks of rows, so that the full tensor is never in memory.

        Args:
            index: The layer.
            name: The parameter; a vector is one block.
            max_bytes: Approximate limit of a block.
        """
        spec, parts = self.spec(index, name), self.parts(index, name)
        if self._adapters_of(index, spec):
            yield self.full(index, name)
            return
        if spec.partition_dim is None or parts[0].dim() == 1:
            yield self._joined(index, spec)
            return
        row_bytes = parts[0][0].numel() * parts[0].element_size() * (len(parts) if spec.partition_dim == 1 else 1)
        step = max(1, max_bytes // max(1, row_bytes))
        groups = [(piece,) for piece in pieces_in_order(spec, parts)] if spec.partition_dim == 0 else [parts]
        for group in groups:
            for start in range(0, group[0].shape[0], step):
                rows = [part[start : start + step] for part in group]
                yield rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def release(self) -> None:
        """Close the open layer's files once its tensors are freed; their pages then no longer count as memory used."""
        self._open = None

    def items(self) -> Iterator[tuple[int, str]]:
        """Yield (layer index, parameter name) of all stored parameters, in order."""
        for index in self._source.indices:
            for name in self.names(index):
                yield index, name

    def _joined(self, index: int, spec: ParameterSpec) -> Tensor:
        where = str(self.path / layer_file(index, 0))
        return join(spec, self.parts(index, spec.name), where=where, on_drift=self._on_drift)

    def _adapters_of(self, index: int, spec: ParameterSpec) -> tuple[ParameterSpec, ...]:
        """Return the stored adapters that are to be added to a weight, because the plan has none."""
        if len(spec.shape) != 2 or self.layers is None or self.layers.lora is not None:
            return ()
        stored = self._states(index)[0]
        found = stored.get(adapter_parameters(spec, 1)[0].name)
        return () if found is None else adapter_parameters(spec, found.shape[0])

    def _adapter_product(self, index: int, spec: ParameterSpec) -> Tensor | None:
        """Return scale * B A, in fp32, if there are such adapters."""
        adapters = self._adapters_of(index, spec)
        if not adapters:
            return None
        if not isinstance(stored := self.args.get("lora"), Mapping):
            raise CheckpointError(
                f"{self.path}: holds adapters, but not their scale: {mp_rank_file(0)} is not complete"
            )
        a, b = (self._joined(index, p).float() for p in adapters)
        return Lora(**stored).scale * (b @ a)

    def _wrong_shape(self, index: int, spec: ParameterSpec, found: Tensor) -> NoReturn:
        raise CheckpointError(
            f"{self.path / layer_file(index, 0)}: {spec.name} has shape {list(found.shape)}, this model's is "
            f"{list(spec.shape)} over all tensor ranks; the checkpoint is of another model"
        )

    def _states(self, index: int) -> list[Mapping[str, Tensor]]:
        if self._open is None or self._open[0] != index:
            self._open = None  # first release the old mapping: its pages count as this process's memory
            if index not in self._source.indices:
                return [{} for _ in range(self.tp_size)]
            self._open = (index, [self._source.state(index, rank) for rank in range(self.tp_size)])
        return self._open[1]

    def _is_embedding(self, index: int) -> bool:
        """Return whether a layer is a head that the checkpoint does not hold and that starts as the embedding."""
        return self._head_from_embedding and self.layers is not None and index == self.layers.head.index

    def _check_layers(self, layers: LayerPlan, other_head: bool) -> None:
        tied, blocks = layers.architecture.tie_word_embeddings, layers.architecture.num_layers
        wanted = {layer.index for layer in layers.weight_layers}
        stored, last_layer = set(self._source.indices), layers.head.index
        if other_head and not layers.architecture.bidirectional:
            copied = last_layer not in stored or self.names(last_layer) == (
                WORD_EMBEDDINGS,
            )  # a tied head may be stored
            self._head_from_embedding = last_layer in wanted and copied
            wanted, stored = wanted - {last_layer}, stored - {last_layer}
        if other_head and 1 in wanted - stored:  # a soft prompt for a network that was trained without one
            self.new_layers = frozenset({1})
            wanted = wanted - {1}
        if missing := sorted(wanted - stored):
            files = ", ".join(layer_file(index, 0) for index in missing)
            last = max(stored) if stored else None
            head = "with a tied head" if tied else "and a head of its own"
            raise CheckpointError(
                f"{self.path}: no weights for layers {missing} ({files}); the model has {blocks} blocks "
                f"{head}, the checkpoint's last layer is {last}"
            )
        extra = [index for index in sorted(stored - wanted) if self.names(index)]
        if tied and extra == [last_layer] and self.names(last_layer) == (WORD_EMBEDDINGS,):
            return  # a tied head's copy of the embedding
        if extra:
            raise CheckpointError(
                f"{self.path}: has weights for layers {extra} that a model of {blocks} blocks "
                f"({'tied' if tied else 'untied'} head) does not have; it is of another model"
            )
