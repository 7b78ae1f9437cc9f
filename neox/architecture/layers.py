"""The layer plan: the one list of layers, parameter names, full shapes, tensor-parallel splits and ties.

Everything that must agree about the network reads it: the modules, the memory estimate, the pipeline stages,
checkpoints (files, reading and splitting over ranks) and the Hugging Face conversion.

Numbering is gpt-neox's: 0 embedding, 1 nothing or a soft prompt, 2..L+1 blocks, L+2 nothing, L+3 final norm (nothing
if blocks end with a norm), L+4 head, and from L+5 on the sentence head of a bidirectional network, or the modules of
multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal

from neox.architecture.architecture import Architecture
from neox.architecture.blocks import BLOCKS
from neox.architecture.choices import POSITIONS, norm_parameters
from neox.architecture.encoder import masked_lm_head_parameters, sentence_head_parameters, token_type_parameters
from neox.architecture.lora import ADAPTER, Lora
from neox.architecture.multi_token import multi_token_parameters
from neox.architecture.parameter import ZEROS, FromKey, ParameterSpec

LayerKind = Literal[
    "embedding",
    "prompt",
    "identity",
    "block",
    "norm",
    "head",
    "masked_lm_head",
    "sentence_head",
    "score_head",
    "multi_token",
]

ADAPTED_LAYERS: tuple[LayerKind, ...] = ("block", "multi_token")
"""Kinds of layers whose linear layers can have adapters."""
BLOCK_OFFSET = 2
"""Index of the first block."""
WORD_EMBEDDINGS = "word_embeddings.weight"
"""The parameter of layer 0 that a tied head uses."""
VOCABULARY = (WORD_EMBEDDINGS, "final_linear.weight", "final_linear.bias")
"""Parameters with a row for each token id."""


@dataclass(frozen=True)
class LayerEntry:
    """One numbered layer; `identity` layers hold no weights and exist to keep NeoX's numbering.

    Attributes:
        index: Number of the layer.
        kind: Kind of the layer.
        parameters: Parameters that it owns, or shares with other blocks.
        tied_to: Index of the layer (0) whose weight a tied head, or multi-token prediction, uses; None for other
            layers. They do not own that weight. On another pipeline stage than the owner they hold a copy that
            DeepSpeed keeps equal.
    """

    index: int
    kind: LayerKind
    parameters: tuple[ParameterSpec, ...] = ()
    tied_to: int | None = None

    @property
    def numel(self) -> int:
        """Number of parameters over all tensor ranks, tied and shared copies not counted."""
        return sum(spec.numel for spec in self.parameters if spec.shared_with is None)

    @property
    def active_numel(self) -> int:
        """Number of these parameters that one token is computed with: not those of experts that it does not choose."""
        return sum(spec.active_numel for spec in self.parameters if spec.shared_with is None)

    @property
    def multiplied(self) -> Iterator[ParameterSpec]:
        """Its matrices that are multiplied with tokens' vectors."""
        return (spec for spec in self.parameters if spec.is_matrix and not spec.looked_up)

    @cached_property
    def matrix_numel(self) -> int:
        """Number of elements of its matrices that one token is multiplied with."""
        return sum(spec.active_numel for spec in self.multiplied)

    @cached_property
    def frozen_matrix_numel(self) -> int:
        """Number of those that are not trained."""
        return sum(spec.active_numel for spec in self.multiplied if not spec.trained)

    def is_hidden(self, parameter: ParameterSpec) -> bool:
        """Return whether one of its parameters is a matrix between hidden states, with drawn weights."""
        return self.kind in ("block", "multi_token") and parameter.init in (FromKey.METHOD, FromKey.OUTPUT_METHOD)


@dataclass(frozen=True)
class LayerPlan:
    """All layers in order; `layers[i].index == i`.

    Attributes:
        layers: The layers.
        architecture: The network that they follow from.
        padded_vocab_size: Rows of the embedding and of the head.
        lora: The adapters among the parameters (`add_adapters`).
    """

    layers: tuple[LayerEntry, ...]
    architecture: Architecture
    padded_vocab_size: int
    lora: Lora | None = None

    def __iter__(self) -> Iterator[LayerEntry]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> LayerEntry:
        return self.layers[index]

    def owner(self, index: int, name: str) -> int:
        """Return the index of the layer that owns a parameter of layer `index`: another one for a shared copy."""
        for spec in self.layers[index].parameters:
            if spec.name == name and spec.shared_with is not None:
                return spec.shared_with
        return index

    @property
    def word_embeddings(self) -> ParameterSpec:
        """The table of the tokens' vectors in layer 0, which a tied head uses, too."""
        return self.layers[0].parameters[0]

    @property
    def head(self) -> LayerEntry:
        """The layer that makes logits of hidden states."""
        return self.layers[BLOCK_OFFSET + self.architecture.num_layers + 2]

    @property
    def multi_token(self) -> tuple[LayerEntry, ...]:
        """The modules of multi-token prediction, nearest token first."""
        return tuple(layer for layer in self.layers if layer.kind == "multi_token")

    def block_number(self, index: int) -> int:
        """Return the number of the block of layer `index`; those of multi-token prediction follow the network's."""
        if self.layers[index].kind == "multi_token":
            return self.architecture.num_layers + index - self.multi_token[0].index
        return index - BLOCK_OFFSET

    @property
    def without_multi_token(self) -> LayerPlan:
        """The same layers with nothing in the place of these modules, as generation uses them."""
        layers = [LayerEntry(layer.index, "identity") if layer in self.multi_token else layer for layer in self.layers]
        return replace(self, layers=tuple(layers))

    @property
    def weight_layers(self) -> tuple[LayerEntry, ...]:
        """The layers that own parameters, so have a file in a checkpoint."""
        return tuple(layer for layer in self.layers if layer.parameters)

    @property
    def numel(self) -> int:
        """Number of parameters of the model, tied weights counted once."""
        return sum(layer.numel for layer in self.layers)

    @property
    def active_numel(self) -> int:
        """Number of parameters that one token is computed with; all but those of experts that it does not choose."""
        return sum(layer.active_numel for layer in self.layers)

    @property
    def trained_numel(self) -> int:
        """Number of the parameters that are trained."""
        return sum(spec.numel for spec in self.parameters if spec.trained)

    @cached_property
    def block_types(self) -> tuple[tuple[LayerEntry, int], ...]:
        """The first block of each type, and the number of blocks of its type."""
        kinds = [*zip(self.architecture.attention, self.architecture.mlp, strict=True)]
        return tuple(
            (self.layers[BLOCK_OFFSET + kinds.index(kind)], kinds.count(kind)) for kind in dict.fromkeys(kinds)
        )

    @cached_property
    def expert_numel(self) -> int:
        """Number of elements of the experts of all blocks."""
        total = 0
        for layer, blocks in self.block_types:
            total += blocks * sum(spec.numel for spec in layer.parameters if spec.experts)
        return total

    @cached_property
    def block_matrix_numel(self) -> int:
        """Number of elements of the matrices of all blocks, with those of every expert."""
        total = 0
        for layer in self.layers:
            if layer.kind == "block":
                total += sum(spec.numel for spec in layer.multiplied)
        return total

    @cached_property
    def trained_share(self) -> float:
        """Share of the elements of the blocks' matrices that are trained; of experts those that a token chooses."""
        trained = 0
        total = 0
        for layer in self.layers:
            if layer.kind != "block":
                continue
            for spec in layer.parameters:
                if spec.is_matrix:
                    total += spec.active_numel
                    trained += spec.active_numel * spec.trained
        return trained / total if total else 1.0

    @property
    def divided_linears(self) -> Iterator[ParameterSpec]:
        """Weights of the linear layers of blocks that tensor ranks divide: without adapters, tables and recurrences."""
        for layer in self.layers:
            if layer.kind == "block":
                yield from self._divided_linears_of(layer)

    @property
    def adaptable_linears(self) -> Iterator[ParameterSpec]:
        """Weights of the linear layers that can have adapters: also whole ones, and those of multi-token prediction."""
        for layer in self.layers:
            if layer.kind in ADAPTED_LAYERS:
                yield from self._divided_linears_of(layer)
                yield from (spec for spec in layer.parameters if spec.of_whole_linear)

    def _divided_linears_of(self, layer: LayerEntry) -> Iterator[ParameterSpec]:
        for spec in layer.multiplied:
            if spec.partition_dim is not None and ADAPTER not in spec.name and not spec.of_recurrence:
                yield spec

    @property
    def trains_head(self) -> bool:
        """Whether the matrix of the logits is trained; a tied head uses the embedding's."""
        owner = self.head if self.head.parameters else self.layers[0]
        return owner.parameters[0].trained

    @property
    def parameters(self) -> Iterator[ParameterSpec]:
        """The parameters of all layers."""
        return chain.from_iterable(layer.parameters for layer in self.layers)


def build_layer_plan(
    architecture: Architecture, padded_vocab_size: int, *, head_parallelism: Literal["row", "column"] = "column"
) -> LayerPlan:
    """List the layers of a network.

    Args:
        architecture: The network.
        padded_vocab_size: Rows of the embedding and of the head.
        head_parallelism: Dimension of an untied head that tensor ranks split: "column" the vocabulary, "row" the
            hidden dimension (NeoX's `output_layer_parallelism`).
    """
    last = architecture.num_layers + 4
    layers = [_embedding(architecture, padded_vocab_size), _prompt(architecture), *_blocks(architecture)]
    layers += [LayerEntry(last - 2, "identity"), _final_norm(architecture, last - 1)]
    if architecture.bidirectional:
        layers += _encoder_heads(architecture, padded_vocab_size, last)
    else:
        layers.append(_head(architecture, padded_vocab_size, last, head_parallelism))
        for number in range(architecture.mtp_num_layers):
            parameters = multi_token_parameters(architecture)
            layers.append(LayerEntry(last + 1 + number, "multi_token", parameters, tied_to=0))
    if architecture.soft_prompt_tokens:
        _freeze_all_but_prompt(layers)
    return LayerPlan(tuple(layers), architecture, padded_vocab_size)


def _embedding(architecture: Architecture, padded_vocab_size: int) -> LayerEntry:
    """Return layer 0: tables of tokens, positions and token types, and a norm of their sum."""
    words = ParameterSpec(WORD_EMBEDDINGS, (padded_vocab_size, architecture.hidden_size), 0)
    positions = POSITIONS[architecture.positions].embedding(architecture)
    norm: tuple[ParameterSpec, ...] = ()
    if architecture.embedding_norm:
        norm = norm_parameters(architecture, "norm")
    return LayerEntry(0, "embedding", (words, *positions, *token_type_parameters(architecture), *norm))


def _prompt(architecture: Architecture) -> LayerEntry:
    """Return layer 1: a soft prompt, or nothing."""
    if not architecture.soft_prompt_tokens:
        return LayerEntry(1, "identity")
    shape = (architecture.soft_prompt_tokens, architecture.hidden_size)
    return LayerEntry(1, "prompt", (ParameterSpec("soft_embedding_weight", shape, init=FromKey.PROMPT_RANGE),))


def _blocks(architecture: Architecture) -> list[LayerEntry]:
    """Return the blocks. The first one with parameters that blocks share owns them, and the others share its."""
    shared = set(POSITIONS[architecture.positions].shared(architecture))
    owner: int | None = None
    blocks = []
    for index, (kind, mlp) in enumerate(zip(architecture.attention, architecture.mlp, strict=True), BLOCK_OFFSET):
        parameters = BLOCKS[kind].parameters(architecture, mlp)
        holds_shared = not shared.isdisjoint(parameters)
        if holds_shared and owner is not None:
            parameters = _sharing(parameters, shared, owner)
        elif holds_shared:
            owner = index
        blocks.append(LayerEntry(index, "block", parameters))
    return blocks


def _sharing(
    parameters: tuple[ParameterSpec, ...], shared: set[ParameterSpec], owner: int
) -> tuple[ParameterSpec, ...]:
    """Return the parameters of a block whose shared ones belong to the layer `owner`."""
    result = []
    for spec in parameters:
        if spec in shared:
            result.append(replace(spec, shared_with=owner))
        else:
            result.append(spec)
    return tuple(result)


def _final_norm(architecture: Architecture, index: int) -> LayerEntry:
    """Return the norm before the head, or nothing if blocks end with a norm."""
    if architecture.residual == "post_norm":
        return LayerEntry(index, "identity")
    return LayerEntry(index, "norm", norm_parameters(architecture, "norm"))


def _head(architecture: Architecture, rows: int, index: int, parallelism: Literal["row", "column"]) -> LayerEntry:
    """Return the head of a causal network: a tied or untied language model head, or a score head."""
    if architecture.score_head:
        weight = ParameterSpec("rm_linear.weight", (1, architecture.hidden_size), 1)
        return LayerEntry(index, "score_head", (weight,))
    if architecture.tie_word_embeddings:
        return LayerEntry(index, "head", tied_to=0)
    split_dim = 0 if parallelism == "column" else 1
    parameters = [ParameterSpec("final_linear.weight", (rows, architecture.hidden_size), split_dim)]
    if architecture.head_bias:
        parameters.append(ParameterSpec("final_linear.bias", (rows,), 0, init=ZEROS))
    return LayerEntry(index, "head", tuple(parameters))


def _encoder_heads(architecture: Architecture, rows: int, index: int) -> list[LayerEntry]:
    """Return the head of a bidirectional network, and the sentence head after it if it has one."""
    tied_to = 0 if architecture.tie_word_embeddings else None
    heads = [LayerEntry(index, "masked_lm_head", masked_lm_head_parameters(architecture, rows), tied_to)]
    if architecture.sentence_head:
        heads.append(LayerEntry(index + 1, "sentence_head", sentence_head_parameters(architecture)))
    return heads


def _freeze_all_but_prompt(layers: list[LayerEntry]) -> None:
    """Replace layers by ones whose parameters are not trained."""
    for index, layer in enumerate(layers):
        if layer.kind != "prompt":
            frozen = tuple(replace(spec, trained=False) for spec in layer.parameters)
            layers[index] = replace(layer, parameters=frozen)
