"""Reading a checkpoint's weights at any tensor-parallel degree, one tensor at a time.

From the files of two tensor ranks to the shard of one of three:

    layer_03-model_00-...pt            layer_03-model_01-...pt
             |                                  |             `layer_sources`: layer files, or `mp_rank` files of one
             |                                  |             stage, or averages of weights (`averaged_files`)
    {name: tensor}                     {name: tensor}         names and experts of gpt-neox's years have become ours
             |                                  |             (`gpt_neox.layer_forms`, `gpt_neox.expert_forms`)
    q q q k v | q q q k v              ...                    `CheckpointReader.parts`: one tensor per rank; rows that
    q q q q q q | k k | v v            ...                    gpt-neox ordered by heads are now in blocks, as ours are
             |                                  |             (`gpt_neox.row_order`)
             +----------------+-----------------+
                              |                               `shards.merge`: split parameters. `shards.join`: also
    Q Q Q Q Q Q Q Q Q Q Q Q | K K K K | V V V V               sums of biases, and means of copies that have drifted
                              |                               `CheckpointReader.full`: rows of the vocabulary are fitted
                              |                               to this padding, and adapters are added
    Q Q Q Q | K | V   (rank 0 of 3)                           `CheckpointReader.shard`: its share of each section

A shard of a plain split parameter skips the full tensor: `merge` takes only the rows that it needs. `fitting` compares
names and shapes by the same road before a run, without reading a weight. `OptimizerReader` reads the optimizer's state
by it, with the same `merge`.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox.architecture import (
    ADAPTER,
    BLOCK_OFFSET,
    VOCABULARY,
    WORD_EMBEDDINGS,
    LayerEntry,
    LayerPlan,
    Lora,
    ParameterSpec,
    adapter_parameters,
)
from neox.checkpoint.gpt_neox.row_order import FUSED, RowOrder, known_order, to_blocks
from neox.checkpoint.identity import ARGS, MODEL
from neox.checkpoint.weights.averaged_files import AveragedFiles, LoadedWeights
from neox.checkpoint.weights.layer_sources import open_source
from neox.checkpoint.weights.shards import fit_vocabulary, join, joined_shape, merge, pieces_in_order, spread
from neox.checkpoint.weights.tensor_files import load_file
from neox.checkpoint_files.manifest import read_manifest
from neox.checkpoint_files.names import ROWS, layer_file, mp_rank_file, parse_mp_rank_file, parse_step_directory
from neox.errors import CheckpointError
from neox.log import get_logger
from neox.parallel import shard

_log = get_logger(__name__)

_DEEPSPEED_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "sparse_tensor_module_names",
        "data_sampler",
        "random_ltd",
        "ds_config",
        "ds_version",
    }
)
"""Entries that DeepSpeed itself puts next to the client state."""

SCORES = "rm_linear.weight"
"""Parameter of a score head."""

_PROJECTION = "eh_proj.weight"
"""Parameter of a module of multi-token prediction, and of no other layer."""

SELECTION = "mixer.x_proj.weight"
"""Parameter of blocks of Mamba that gpt-neox's tensor ranks use without their sum."""

UNUSED_IN_NEOX = ("post_attention_layernorm.",)
"""Parameters that gpt-neox keeps next to one norm for both branches (`gpt_j_tied`), and never uses."""


class CheckpointReader:
    """The weights and the client state in one `global_stepN` directory.

    It reads NeoX's layer files (v2.0 and later names) and one-stage `mp_rank` files. Tensors are memory-mapped, and
    only one layer's files are open at a time, so read layer by layer.

    Args:
        path: The directory.
        layers: Layers of the network that reads. Without them only the stored parts can be read. If they have no
            adapters, the checkpoint's adapters are added to the weights.
        weights: Weights that are read: the trained ones, or their average.
        finetune: Whether the network may differ from the checkpoint's as fine-tuning allows. An untied head that is not
            stored starts as the embedding. A stored head that the network lacks is left out. Adapters, a soft prompt
            and modules of multi-token prediction may be missing, and the latter may be more than the network has.
        gpt_neox_date: Date of the gpt-neox that wrote the checkpoint (`gpt_neox_version`), for files that do not tell
            in which form they are.

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
        weights: LoadedWeights = "trained",
        finetune: bool = False,
        gpt_neox_date: datetime.date | None = None,
    ) -> None:
        self.path = Path(path)
        self.layers = layers
        self.new_layers: frozenset[int] = frozenset()
        self._averaged: dict[str, dict[int, float]] = {}
        self._finetune = finetune
        self._gpt_neox_date = gpt_neox_date
        self._source = open_source(self.path)
        if weights == "ema":
            self._source = AveragedFiles(self.path, self._source)
        self._open: tuple[int, list[Mapping[str, Tensor]]] | None = None
        self._head_from_embedding = False
        if layers is not None:
            self._check_layers(layers)

    @property
    def tp_size(self) -> int:
        """Tensor-parallel degree of the files."""
        return self._source.tp_size

    @property
    def indices(self) -> tuple[int, ...]:
        """Layers that have weights, in NeoX's numbering, in ascending order."""
        return tuple(filter(self.names, self._source.indices))

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding over all tensor ranks, padding included."""
        return sum(part.shape[0] for part in self.parts(0, WORD_EMBEDDINGS))

    @cached_property
    def _client_files(self) -> dict[int, Path]:
        """Model rank -> its `mp_rank` file."""
        files = {}
        for path in self.path.iterdir():
            rank = parse_mp_rank_file(path.name)
            if rank is not None:
                files[rank] = path
        return files

    @property
    def pp_size(self) -> int | None:
        """Pipeline degree of the files; None without `mp_rank` files."""
        if not self._client_files:
            return None
        return len(self._client_files) // self.tp_size

    @cached_property
    def client_state(self) -> Mapping[str, Any]:
        """State of the run that model rank 0 stored (counters, `args`, random states); may be empty."""
        return {key: value for key, value in self._stored_state.items() if key not in _DEEPSPEED_KEYS}

    @cached_property
    def _stored_state(self) -> Mapping[str, Any]:
        """Content of model rank 0's `mp_rank` file but the weights; may be empty."""
        path = self._client_files.get(0)
        if path is None:
            return {}
        return {key: value for key, value in load_file(path).items() if key not in ("module", "optimizer")}

    @cached_property
    def row_order(self) -> RowOrder:
        """Order of the rows of fused queries, keys and values in the files.

        Raises:
            CheckpointError: If grouped heads may have two orders, and nothing tells which the files have.
        """
        architecture = self._network("in which order the rows of queries, keys and values are").architecture
        if architecture.num_kv_heads == architecture.num_attention_heads or self.is_own:
            return "blocks"
        first_block = min(filter(lambda index: index >= BLOCK_OFFSET, self._source.indices), default=BLOCK_OFFSET)
        names = self._source.stored_names(first_block)
        found = known_order(self.path, architecture, names, self._stored_state, self._gpt_neox_date)
        _log.info("%s: rows of queries, keys and values are read as %s: %s", self.path, found.order, found.reason)
        return found.order

    @property
    def is_own(self) -> bool:
        """Whether this program wrote the checkpoint, in any version; else gpt-neox did."""
        if read_manifest(self.path) is not None or ROWS in self.client_state:
            return True
        return MODEL in self.client_state  # older versions, copied without the manifest

    @property
    def args(self) -> Mapping[str, Any]:
        """The model's settings that the run stored, under NeoX's names."""
        settings: dict[str, Any] = {}
        for key in (ARGS, MODEL):
            stored = self.client_state.get(key)
            if isinstance(stored, Mapping):
                settings.update(stored)
        return settings

    @property
    def iteration(self) -> int:
        """Completed steps, from the client state or the directory's name. Raises CheckpointError without both."""
        for key in ("iteration", "global_steps"):
            value = self.client_state.get(key)
            if isinstance(value, int):
                return value
        step = parse_step_directory(self.path.resolve().name)
        if step is not None:
            return step
        raise CheckpointError(
            f"{self.path}: neither its client state nor its name gives the iteration; name it global_stepN"
        )

    @property
    def iteration_or_none(self) -> int | None:
        """Completed steps; None in a renamed directory without client state."""
        try:
            return self.iteration
        except CheckpointError:
            return None

    def names(self, index: int) -> tuple[str, ...]:
        """Return the names of the parameters stored for layer `index`; without adapters that are added to weights."""
        stored = tuple(self._states(index)[0])
        if self._adds_adapters:
            return tuple(name for name in stored if ADAPTER not in name)
        return stored

    def parts(self, index: int, name: str) -> tuple[Tensor, ...]:
        """Return the stored tensors of one parameter, one per tensor rank, memory-mapped.

        With the network, rows of grouped heads are in this program's order, whatever the files'.
        """
        found = []
        for state in self._states(index):
            if name not in state:
                raise CheckpointError(
                    f"{self.path}: layer {index} has no `{name}`; it holds {', '.join(state) or 'nothing'}"
                )
            found.append(state[name])
        if name == SELECTION and len(found) > 1 and not self.is_own:
            raise CheckpointError(
                f"{self.path}: layer {index} is a block mamba of {len(found)} tensor ranks of gpt-neox. These do not "
                f"sum `{name}`, so each selects by its own channels: another network than that of one rank. "
                "Only checkpoints of model_parallel_size 1 can be read"
            )
        return tuple(self.in_this_order(name, found))

    def in_this_order(self, name: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return tensor ranks' parts of a parameter, or of a state of it, in this program's order of rows."""
        if self.layers is None or not name.startswith(FUSED) or ADAPTER in name or self.row_order == "blocks":
            return list(parts)
        return [to_blocks(part, self.row_order, self.layers.architecture) for part in parts]

    def spec(self, index: int, name: str) -> ParameterSpec:
        """Return the plan's specification of a parameter."""
        layers = self._network(f"how layer {index} `{name}` is split")
        layer = layers[index]
        candidates = layer.parameters
        if layer.tied_to is not None:  # a tied head's file may hold copies
            candidates += layers[layer.tied_to].parameters
        for spec in candidates:
            if spec.name == name:
                return spec
        raise CheckpointError(f"{self.path}: this network's layer {index} has no `{name}`")

    def full(self, index: int, name: str) -> Tensor:
        """Return the full parameter: tensor ranks joined, the vocabulary fitted to the plan's padding.

        The result may be a view of the mapped file: clone it before writing into it.
        """
        if self.starts_as_embedding(index):
            return self.full(0, WORD_EMBEDDINGS)
        spec = self.spec(index, name)
        full = self._joined(index, spec)
        if name in VOCABULARY:
            full = fit_vocabulary(spec, full, self.args.get("vocab_size"))
        self._refuse_other_shape(index, spec, full)
        adapters = self._adapters_of(index, spec)
        if not adapters:
            return full
        return (full.float() + self._adapter_product(index, adapters)).to(full.dtype)

    def shard(self, index: int, name: str, tp_rank: int, tp_size: int) -> Tensor:
        """Return tensor rank `tp_rank`'s part at degree `tp_size`, for any degree of the files.

        A `summed_in_neox` bias is the whole sum on every rank. Of other replicated parameters, a rank gets its own copy
        at the files' degree, as in gpt-neox, and the mean of the copies at another. Only the parts that are needed are
        read.
        """
        spec = self.spec(index, name)
        has_adapters = bool(self._adapters_of(index, spec))

        # Copies drift apart in gpt-neox. At the files' degree each rank continues with its own.
        is_replicated = spec.partition_dim is None and not spec.summed_in_neox and name not in VOCABULARY
        if is_replicated and tp_size == self.tp_size and not has_adapters:
            own = self.parts(index, name)[tp_rank]
            self._refuse_other_shape(index, spec, own)
            return own

        # Values that are computed from more than this rank's rows.
        if spec.partition_dim is None or self.starts_as_embedding(index) or has_adapters:
            return shard(self.full(index, name), spec, tp_rank, tp_size)
        parts = self.parts(index, name)
        if joined_shape(spec, parts) != spec.shape:  # another padding, or another model
            return shard(self.full(index, name), spec, tp_rank, tp_size)

        return merge(spec, parts, spec.ranges(tp_rank, tp_size))

    def layer_shard(self, index: int, tp_rank: int, tp_size: int) -> dict[str, Tensor]:
        """Return one layer's parameters for one tensor rank, by name."""
        layers = self._network(f"what layer {index} holds")
        layer = layers[index]
        if layer.kind == "block":  # other layers' files may hold more: a tied head's file a copy of the embedding
            self._refuse_unknown(layer)
        stored = self.names(index)
        tensors = {}
        for spec in layer.parameters:
            if self._finetune and ADAPTER in spec.name and spec.name not in stored:
                continue  # a new adapter keeps its initial values
            tensors[spec.name] = self.shard(index, spec.name, tp_rank, tp_size)
        return tensors

    def shape(self, index: int, name: str) -> tuple[int, ...]:
        """Return the shape of the parameter over all tensor ranks as stored, with the stored padding."""
        return joined_shape(self.spec(index, name), self.parts(index, name))

    def row_blocks(self, index: int, name: str, max_bytes: int = 1 << 23) -> Iterator[Tensor]:
        """Yield the parameter as stored in blocks of rows, so that the full tensor is never in memory.

        Args:
            index: Index of the layer.
            name: Name of the parameter; a vector is one block, also as [1, 1, N], and so is each expert of a stack.
            max_bytes: Approximate limit of a block.
        """
        spec = self.spec(index, name)
        parts = self.parts(index, name)
        if self._adapters_of(index, spec) and not spec.experts:
            yield self.full(index, name)
        elif spec.partition_dim is None or parts[0].dim() == 1 or parts[0].shape[0] == 1:
            yield self._joined(index, spec)
        elif spec.experts:
            for expert in range(spec.experts):
                yield self.expert(index, name, expert).unsqueeze(0)
        elif spec.partition_dim == 0:
            for piece in pieces_in_order(spec, parts):
                yield from _row_blocks([piece], max_bytes)
        else:
            yield from _row_blocks(parts, max_bytes)

    def expert(self, index: int, name: str, expert: int) -> Tensor:
        """Return the weight of one expert of a stack [rows, columns], without reading the others.

        Args:
            index: Index of the layer.
            name: Name of the stack.
            expert: Number of the expert.
        """
        spec = self.spec(index, name)
        assert spec.partition_dim is not None
        of_one = replace(spec, shape=spec.shape[1:], partition_dim=spec.partition_dim - 1, experts=0)
        of_ranks = [part[expert] for part in self.parts(index, name)]
        weight = merge(of_one, of_ranks)
        adapters = self._adapters_of(index, spec)
        if not adapters:
            return weight
        return (weight.float() + self._adapter_product(index, adapters, expert)).to(weight.dtype)

    def remember_mean(self, index: int, name: str, copies: Sequence[Tensor]) -> None:
        """Remember for `note_averages` that the mean of a replicated parameter's copies was read, if they differ."""
        difference = spread(copies)
        if difference:
            self._averaged.setdefault(name, {})[index] = difference

    def note_averages(self) -> None:
        """Log which replicated parameters were read as the mean of copies that differ, and by how much these differ."""
        if not self._averaged:
            return
        described = []
        for name, of_layers in self._averaged.items():
            layers = "layer" if len(of_layers) == 1 else f"{len(of_layers)} layers, such as"
            largest = max(of_layers, key=lambda index: of_layers[index])
            described.append(f"{name} (by up to {of_layers[largest]:.3g} in {layers} {largest})")
        _log.warning(
            "%s: the copies of %d parameters differ between its %d tensor ranks, which gpt-neox does not keep equal; "
            "their means are used: %s",
            self.path,
            sum(map(len, self._averaged.values())),
            self.tp_size,
            ", ".join(described),
        )
        self._averaged.clear()

    def release(self) -> None:
        """Close the open layer's files once its tensors are freed. Their pages then no longer count as memory used."""
        self._open = None

    def items(self) -> Iterator[tuple[int, str]]:
        """Yield (layer index, parameter name) of all stored parameters, in order."""
        for index in self._source.indices:
            for name in self.names(index):
                yield index, name

    @property
    def _adds_adapters(self) -> bool:
        """Whether stored adapters are added to the weights, because the network that reads has none."""
        return self.layers is not None and self.layers.lora is None

    def _network(self, purpose: str) -> LayerPlan:
        """Return the layers of the network. Raises CheckpointError if the reader was opened without them."""
        if self.layers is None:
            raise CheckpointError(f"{self.path}: the network is needed to know {purpose}")
        return self.layers

    def _joined(self, index: int, spec: ParameterSpec) -> Tensor:
        """Return a parameter as stored, its tensor ranks joined."""
        parts = self.parts(index, spec.name)
        joined = join(spec, parts, where=str(self.path / layer_file(index, 0)))
        if spec.partition_dim is None and not spec.summed_in_neox:
            self.remember_mean(index, spec.name, parts)
        return joined

    def _refuse_other_shape(self, index: int, spec: ParameterSpec, tensor: Tensor) -> None:
        """Raise CheckpointError if a full tensor does not have the shape of this network."""
        if tuple(tensor.shape) != spec.shape:
            raise CheckpointError(
                f"{self.path / layer_file(index, 0)}: {spec.name} has shape {list(tensor.shape)}, this model's is "
                f"{list(spec.shape)} over all tensor ranks; the checkpoint is of another model"
            )

    def _adapters_of(self, index: int, spec: ParameterSpec) -> tuple[ParameterSpec, ...]:
        """Return the stored adapters A and B that are added to a weight; none if there are none to add."""
        if len(spec.shape) < 2 or not self._adds_adapters:
            return ()
        first, _ = adapter_parameters(spec, 1)
        stored = self._states(index)[0].get(first.name)
        if stored is None:
            return ()
        return adapter_parameters(spec, rank=stored.shape[-2])

    def _adapter_product(self, index: int, adapters: tuple[ParameterSpec, ...], expert: int | None = None) -> Tensor:
        """Return scale * B A in fp32; of one expert, or of all of a stack."""
        settings = self.args.get("lora")
        if not isinstance(settings, Mapping):
            raise CheckpointError(
                f"{self.path}: holds adapters, but not their scale: {mp_rank_file(0)} is not complete"
            )
        spec_a, spec_b = adapters
        a = self._joined(index, spec_a).float()
        b = self._joined(index, spec_b).float()
        if expert is not None:
            a = a[expert]
            b = b[expert]
        return Lora(**settings).scale * (b @ a)

    def _states(self, index: int) -> list[Mapping[str, Tensor]]:
        """Return the stored weights of a layer on every tensor rank; empty ones for a layer without files."""
        if index not in self._source.indices:
            return [{}] * self.tp_size
        if self._open is None or self._open[0] != index:
            self._open = None  # first release the old mapping: its pages count as this process's memory
            self._open = (index, [self._source.state(index, rank) for rank in range(self.tp_size)])
        return self._open[1]

    def starts_as_embedding(self, index: int) -> bool:
        """Return whether a layer is a head that the checkpoint does not hold and that starts as the embedding."""
        return self._head_from_embedding and self.layers is not None and index == self.layers.head.index

    def _check_layers(self, layers: LayerPlan) -> None:
        """Compare the stored layers with those of the network, and note what fine-tuning starts anew."""
        head = layers.head.index
        wanted = {layer.index for layer in layers.weight_layers}
        stored = set(self._source.indices)
        # A file of a tied head may hold a copy of the embedding.
        chooses_head = self._finetune and not layers.architecture.bidirectional
        has_own_head = False
        if head in stored and (chooses_head or layers.architecture.tie_word_embeddings):
            has_own_head = self.names(head) != (WORD_EMBEDDINGS,)
        if chooses_head:
            self._choose_head(layers, has_own_head=has_own_head)
            wanted.discard(head)
            stored.discard(head)
        if self._finetune and 1 in wanted - stored:  # a soft prompt for a network that was trained without one
            self.new_layers |= {1}
            wanted.discard(1)
        if self._finetune and not layers.architecture.bidirectional:
            # Modules of multi-token prediction start anew in a network that was trained without them, or are left out.
            modules = {layer.index for layer in layers.multi_token}
            if layers.lora is not None and not modules <= stored:
                raise CheckpointError(
                    f"{self.path} lacks modules of `mtp_num_layers`, and `lora` would leave new ones as they are "
                    "drawn: use as many as it has, or train modules before adapters"
                )
            self.new_layers |= modules - stored
            wanted -= modules - stored
            stored -= {index for index in stored if _PROJECTION in self.names(index)} - modules
        if layers.architecture.tie_word_embeddings and not has_own_head and head not in wanted:
            stored.discard(head)
        self._refuse_missing(sorted(wanted - stored), layers, stored)
        self._refuse_extra(sorted(stored - wanted), layers)

    def _choose_head(self, layers: LayerPlan, *, has_own_head: bool) -> None:
        """Choose the source of the head for fine-tuning: the checkpoint's head, its embedding, or initial values.

        Args:
            layers: The network.
            has_own_head: Whether the checkpoint has an untied head.

        Raises:
            CheckpointError: If a language model head is needed, but the checkpoint has a score head.
        """
        head = layers.head
        has_scores = has_own_head and SCORES in self.names(head.index)
        if layers.architecture.score_head:
            if not has_scores:
                self.new_layers |= {head.index}
            return
        if has_scores and head.tied_to is None:
            raise CheckpointError(
                f"{self.path} is a reward model: its head computes scores, but this network needs logits; train a "
                "reward model (train_impl: rm), or load the model that it was trained from"
            )
        self._head_from_embedding = bool(head.parameters) and not has_own_head

    def unknown_names(self, layer: LayerEntry) -> list[str]:
        """Return the names of the parameters that the checkpoint holds of a block and that the network lacks."""
        layers = self._network(f"what layer {layer.index} holds")
        unused = UNUSED_IN_NEOX if layers.architecture.residual == "parallel_one_norm" else ()
        known = {spec.name for spec in layer.parameters}
        unknown = []
        for name in self.names(layer.index):
            if name not in known and ADAPTER not in name and not name.startswith(unused):
                unknown.append(name)
        return sorted(unknown)

    def _refuse_unknown(self, layer: LayerEntry) -> None:
        """Raise CheckpointError if the checkpoint holds parameters of a block that the network lacks."""
        unknown = self.unknown_names(layer)
        if unknown:
            raise CheckpointError(
                f"{self.path / layer_file(layer.index, 0)}: holds {', '.join(unknown)}, which this model does not have "
                f"in layer {layer.index}; it is of another model"
            )

    def _refuse_missing(self, missing: list[int], layers: LayerPlan, stored: set[int]) -> None:
        """Raise CheckpointError if the checkpoint lacks layers of the network."""
        if not missing:
            return
        files = ", ".join(layer_file(index, 0) for index in missing)
        head = "with a tied head" if layers.architecture.tie_word_embeddings else "and a head of its own"
        last = max(stored, default=None)
        raise CheckpointError(
            f"{self.path}: no weights for layers {missing} ({files}); the model has {layers.architecture.num_layers} "
            f"blocks {head}, the checkpoint's last layer is {last}"
        )

    def _refuse_extra(self, extra: list[int], layers: LayerPlan) -> None:
        """Raise CheckpointError if the checkpoint has weights for layers that the network lacks."""
        with_weights = list(filter(self.names, extra))
        if not with_weights:
            return
        head = "tied" if layers.architecture.tie_word_embeddings else "untied"
        raise CheckpointError(
            f"{self.path}: has weights for layers {with_weights} that a model of {layers.architecture.num_layers} "
            f"blocks ({head} head) does not have; it is of another model"
        )


def _row_blocks(parts: Sequence[Tensor], max_bytes: int) -> Iterator[Tensor]:
    """Yield blocks of rows of matrices that stand next to each other.

    Args:
        parts: Matrices [rows, columns] with equally many rows.
        max_bytes: Approximate limit of a block.
    """
    row_bytes = sum(part.shape[1] * part.element_size() for part in parts)
    step = max(1, max_bytes // max(1, row_bytes))
    for start in range(0, parts[0].shape[0], step):
        rows = [part[start : start + step] for part in parts]
        yield rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
