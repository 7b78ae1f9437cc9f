"""The layer plan: the one list of layers, parameter names, full shapes, tensor-parallel splits and ties.

Everything that must agree about the network reads it: the modules, the memory estimate, the pipeline stages,
checkpoints (files, reading and splitting over ranks) and the Hugging Face conversion.

Numbering is gpt-neox's: 0 embedding, 1 nothing or a soft prompt, 2..L+1 blocks, L+2 nothing, L+3 final norm (nothing
if blocks end with a norm), L+4 head, and L+5 the sentence head of a bidirectional network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Literal, NamedTuple

from neox.architecture.architecture import GATED_KINDS, Architecture
from neox.architecture.choices import ATTENTION, MLPS, POSITIONS, norm_parameters
from neox.architecture.encoder import masked_lm_head_parameters, sentence_head_parameters, token_type_parameters
from neox.architecture.gmlp import gated_block_parameters
from neox.architecture.lora import Lora
from neox.architecture.parameter import ParameterSpec

LayerKind = Literal[
    "embedding", "prompt", "identity", "block", "norm", "head", "masked_lm_head", "sentence_head", "score_head"
]

BLOCK_OFFSET = 2
"""Index of the first block."""
WORD_EMBEDDINGS = "word_embeddings.weight"
"""The parameter of layer 0 that a tied head uses."""
VOCABULARY = (WORD_EMBEDDINGS, "final_linear.weight", "final_linear.bias")
"""Parameters with a row for each token id."""


class NormSlots(NamedTuple):
    """Names of a block's norms before and after its two sublayers; None for no norm."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None

    @property
    def number(self) -> int:
        """Number of norms."""
        return sum(name is not None for name in self)


class Residual(NamedTuple):
    """How a block adds its sublayers to the residual stream.

    Attributes:
        norms: The block's norms.
        rule: Key of `neox.model.RESIDUAL_RULES`: what is added to what.
    """

    norms: NormSlots
    rule: Literal["sequential", "parallel", "parallel_one_norm", "post_norm"]


_NORMS_BEFORE = NormSlots(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
_NORMS_AFTER = NormSlots(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
_NORMS_AROUND = NormSlots(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
RESIDUALS: Mapping[str, Residual] = MappingProxyType(
    {
        "sequential": Residual(_NORMS_BEFORE, "sequential"),
        "parallel": Residual(_NORMS_BEFORE, "parallel"),
        "parallel_one_norm": Residual(NormSlots(before_attention="input_layernorm"), "parallel_one_norm"),
        "sublayer_output_norm": Residual(_NORMS_AFTER, "sequential"),
        "sandwich": Residual(_NORMS_AROUND, "sequential"),
        "post_norm": Residual(_NORMS_AFTER, "post_norm"),
    }
)
"""Residual connections by name:

- `sequential`: y = x + attention(norm(x)), then y + mlp(norm(y)).
- `parallel`: x + attention(norm(x)) + mlp(other_norm(x)).
- `parallel_one_norm`: x + attention(norm(x)) + mlp(norm(x)).
- `sublayer_output_norm`: y = x + norm(attention(x)), then y + norm(mlp(y)) (OLMo-2).
- `sandwich`: y = x + norm(attention(norm(x))), then y + norm(mlp(norm(y))) (Gemma 2).
- `post_norm`: y = norm(x + attention(x)), then norm(y + mlp(y)), and no final norm (BERT).
"""


@dataclass(frozen=True)
class LayerEntry:
    """One numbered layer; `identity` layers hold no weights and exist to keep NeoX's numbering.

    Attributes:
        index: Number of the layer.
        kind: Kind of the layer.
        parameters: Parameters that it owns, or shares with other blocks.
        tied_to: Index of the layer (0) whose weight a tied head uses; None for other layers. The head does not own that
            weight. On another pipeline stage than the owner it holds a copy that DeepSpeed keeps equal.
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
    def matrix_numel(self) -> int:
        """Number of elements of its matrices that one token is multiplied with."""
        return sum(spec.active_numel for spec in self.parameters if spec.is_matrix)

    def is_hidden(self, parameter: ParameterSpec) -> bool:
        """Return whether one of its parameters is a matrix between hidden states: of a block, with drawn weights."""
        return self.kind == "block" and parameter.init in ("weight", "output_weight")


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
    if architecture.soft_prompt_tokens:
        _freeze_all_but_prompt(layers)
    return LayerPlan(tuple(layers), architecture, padded_vocab_size)


def _embedding(architecture: Architecture, padded_vocab_size: int) -> LayerEntry:
    """Return layer 0: tables of tokens, positions and token types, and a norm of their sum."""
    words = ParameterSpec(WORD_EMBEDDINGS, (padded_vocab_size, architecture.hidden_size), 0)
    positions = POSITIONS[architecture.positions].embedding(architecture)
    norm = _norm(architecture, "norm" if architecture.embedding_norm else None)
    return LayerEntry(0, "embedding", (words, *positions, *token_type_parameters(architecture), *norm))


def _prompt(architecture: Architecture) -> LayerEntry:
    """Return layer 1: a soft prompt, or nothing."""
    if not architecture.soft_prompt_tokens:
        return LayerEntry(1, "identity")
    shape = (architecture.soft_prompt_tokens, architecture.hidden_size)
    return LayerEntry(1, "prompt", (ParameterSpec("soft_embedding_weight", shape, init="prompt"),))


def _blocks(architecture: Architecture) -> list[LayerEntry]:
    """Return the blocks. The first one with parameters that blocks share owns them, and the others share its."""
    shared = set(POSITIONS[architecture.positions].shared(architecture))
    owner: int | None = None
    blocks = []
    for index, (attention, mlp) in enumerate(zip(architecture.attention, architecture.mlp, strict=True), BLOCK_OFFSET):
        parameters = _block_parameters(architecture, attention, mlp)
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
        parameters.append(ParameterSpec("final_linear.bias", (rows,), 0, init="zeros"))
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


def _block_parameters(architecture: Architecture, attention: str, mlp: str) -> tuple[ParameterSpec, ...]:
    """Return the parameters of a block, in the order of its sublayers."""
    if attention in GATED_KINDS:
        return gated_block_parameters(architecture, attention)
    norms = RESIDUALS[architecture.residual].norms
    shared = POSITIONS[architecture.positions].shared(architecture)
    return (
        *_norm(architecture, norms.before_attention),
        *ATTENTION[attention].parameters(architecture),
        *shared,
        *_norm(architecture, norms.after_attention),
        *_norm(architecture, norms.before_mlp),
        *MLPS[mlp].parameters(architecture),
        *_norm(architecture, norms.after_mlp),
    )


def _norm(architecture: Architecture, module: str | None) -> tuple[ParameterSpec, ...]:
    """Return the parameters of a norm with the name of its module; none for None."""
    if module is None:
        return ()
    return norm_parameters(architecture, module)
