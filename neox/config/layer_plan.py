"""The layer plan: the one list of layers, parameter names, full shapes, tensor-parallel splits and ties.

Everything that must agree about the network reads it: the model that builds the layers, the memory estimate, the
pipeline stages, checkpoints (files, joining and splitting over ranks) and the Hugging Face conversion. No torch here.

Numbering is gpt-neox's: 0 embedding, 1 nothing, 2..L+1 blocks, L+2 nothing, L+3 final norm, L+4 head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

LayerKind = Literal["embedding", "identity", "block", "norm", "head"]


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of one layer.

    name: the name inside its layer, as in NeoX's layer files (`attention.query_key_value.weight`).
    shape: the full (unsplit) shape.
    partition_dim: the dimension split over tensor ranks, or None where every tensor rank holds the same copy.
    summed_in_neox: in gpt-neox's own files the full value is the SUM of the tensor ranks' values (row-parallel biases
        under `gpt_j_residual`); ours holds one value and writes it on rank 0 with zeros elsewhere.
    decay: whether weight decay applies (NeoX: not to biases, not to norms).
    """

    name: str
    shape: tuple[int, ...]
    partition_dim: int | None = None
    summed_in_neox: bool = False
    decay: bool = True

    @property
    def numel(self) -> int:
        """Number of elements over all tensor ranks."""
        return prod(self.shape)

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """Shape on one of `tp_size` tensor ranks."""
        if self.partition_dim is None:
            return self.shape
        return tuple(n // tp_size if dim == self.partition_dim else n for dim, n in enumerate(self.shape))


@dataclass(frozen=True)
class LayerEntry:
    """One numbered layer: `identity` layers hold no weights and exist to keep NeoX's numbering.

    tied_to: for a head that uses another layer's weight, that layer's index (0); such a head owns no parameters and,
        where it is on another pipeline stage, holds a copy that DeepSpeed keeps equal.
    """

    index: int
    kind: LayerKind
    parameters: tuple[ParameterSpec, ...] = ()
    tied_to: int | None = None

    @property
    def numel(self) -> int:
        """Number of parameters over all tensor ranks, tied copies not counted."""
        return sum(p.numel for p in self.parameters)


@dataclass(frozen=True)
class LayerPlan:
    """All layers in order; `layers[i].index == i`."""

    layers: tuple[LayerEntry, ...]
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    padded_vocab_size: int
    tied: bool

    def __iter__(self) -> Iterator[LayerEntry]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> LayerEntry:
        return self.layers[index]

    @property
    def weight_layers(self) -> tuple[LayerEntry, ...]:
        """The layers that own parameters, so have a file in a checkpoint."""
        return tuple(layer for layer in self.layers if layer.parameters)

    @property
    def numel(self) -> int:
        """Number of parameters of the model, tied weights counted once."""
        return sum(layer.numel for layer in self.layers)


def build_layer_plan(
    *,
    num_layers: int,
    hidden_size: int,
    num_attention_heads: int,
    padded_vocab_size: int,
    gpt_j_residual: bool,
    no_weight_tying: bool,
    output_layer_parallelism: Literal["row", "column"],
) -> LayerPlan:
    """List the layers of a GPT-NeoX model (LayerNorm with biases, biased linears, 4 x hidden MLP)."""
    h = hidden_size

    def norm(name: str) -> tuple[ParameterSpec, ParameterSpec]:
        return ParameterSpec(f"{name}weight", (h,), decay=False), ParameterSpec(f"{name}bias", (h,), decay=False)

    def row_bias(name: str) -> ParameterSpec:
        return ParameterSpec(name, (h,), summed_in_neox=gpt_j_residual, decay=False)

    block = (
        *norm("input_layernorm."),
        ParameterSpec("attention.query_key_value.weight", (3 * h, h), 0),
        ParameterSpec("attention.query_key_value.bias", (3 * h,), 0, decay=False),
        ParameterSpec("attention.dense.weight", (h, h), 1),
        row_bias("attention.dense.bias"),
        *norm("post_attention_layernorm."),
        ParameterSpec("mlp.dense_h_to_4h.weight", (4 * h, h), 0),
        ParameterSpec("mlp.dense_h_to_4h.bias", (4 * h,), 0, decay=False),
        ParameterSpec("mlp.dense_4h_to_h.weight", (h, 4 * h), 1),
        row_bias("mlp.dense_4h_to_h.bias"),
    )
    embedding = (ParameterSpec("word_embeddings.weight", (padded_vocab_size, h), 0),)
    head_split = 0 if output_layer_parallelism == "column" else 1
    head = (ParameterSpec("final_linear.weight", (padded_vocab_size, h), head_split),) if no_weight_tying else ()
    last = num_layers + 4
    layers = (
        LayerEntry(0, "embedding", embedding),
        LayerEntry(1, "identity"),
        *(LayerEntry(i + 2, "block", block) for i in range(num_layers)),
        LayerEntry(last - 2, "identity"),
        LayerEntry(last - 1, "norm", norm("norm.")),
        LayerEntry(last, "head", head, tied_to=None if no_weight_tying else 0),
    )
    return LayerPlan(layers, num_layers, h, num_attention_heads, padded_vocab_size, tied=not no_weight_tying)
