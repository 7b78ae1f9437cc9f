"""The layer plan: the one list of layers, parameter names, full shapes, tensor-parallel splits and ties.

Everything that must agree about the network reads it: the modules, the memory estimate, the pipeline stages,
checkpoints (files, reading and splitting over ranks) and the Hugging Face conversion.

Numbering is gpt-neox's: 0 embedding, 1 nothing or a soft prompt, 2..L+1 blocks, L+2 nothing, L+3 final norm (nothing
where blocks end with a norm), L+4 head, and L+5 the sentence head of a bidirectional network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from neox.architecture.architecture import GATED_KINDS, Architecture
from neox.architecture.choices import ATTENTION, MLPS, POSITIONS, norm_parameters
from neox.architecture.encoder import masked_lm_head_parameters, sentence_head_parameters, token_type_parameters
from neox.architecture.gmlp import gated_block_parameters
from neox.architecture.parameter import ParameterSpec

if TYPE_CHECKING:
    from neox.architecture.adapters import Lora

LayerKind = Literal["embedding", "prompt", "identity", "block", "norm", "head", "masked_lm_head", "sentence_head"]

BLOCK_OFFSET = 2
"""Index of the first block."""
WORD_EMBEDDINGS = "word_embeddings.weight"
"""The parameter of layer 0 that a tied head uses."""


class NormSlots(NamedTuple):
    """Names of a block's norms before and after its two sublayers; None for no norm."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


_NORMS_BEFORE = NormSlots(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
_NORMS_AFTER = NormSlots(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
BLOCK_NORMS: Mapping[str, NormSlots] = MappingProxyType(
    {
        "sequential": _NORMS_BEFORE,
        "parallel": _NORMS_BEFORE,
        "parallel_one_norm": NormSlots(before_attention="input_layernorm"),
        "sublayer_output_norm": _NORMS_AFTER,
        "post_norm": _NORMS_AFTER,
    }
)
"""Norms of a block by its residual rule, whose sums are the entry of the same name in `neox.model.RESIDUALS`."""


@dataclass(frozen=True)
class LayerEntry:
    """One numbered layer; `identity` layers hold no weights and exist to keep NeoX's numbering.

    Attributes:
        index: Its number.
        kind: What it is.
        parameters: What it owns.
        tied_to: For a head that uses another layer's weight, that layer's index (0). Such a head does not own that
            weight; on another pipeline stage than its owner it holds a copy that DeepSpeed keeps equal.
    """

    index: int
    kind: LayerKind
    parameters: tuple[ParameterSpec, ...] = ()
    tied_to: int | None = None

    @property
    def numel(self) -> int:
        """Number of parameters over all tensor ranks, tied and shared copies not counted."""
        return sum(p.numel for p in self.parameters if p.shared_with is None)

    def is_hidden(self, parameter: ParameterSpec) -> bool:
        """Return whether one of its parameters is a matrix between hidden states: of a block, with drawn weights."""
        return self.kind == "block" and parameter.init in ("weight", "output_weight")


@dataclass(frozen=True)
class LayerPlan:
    """All layers in order; `layers[i].index == i`.

    Attributes:
        layers: The layers.
        architecture: What they follow from.
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
        return next((p.shared_with for p in self.layers[index].parameters if p.name == name and p.shared_with), index)

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
    def trained_numel(self) -> int:
        """Number of the parameters that are trained."""
        return sum(p.numel for layer in self.layers for p in layer.parameters if p.trained)


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
    words = ParameterSpec(WORD_EMBEDDINGS, (padded_vocab_size, architecture.hidden_size), 0)
    positions = POSITIONS[architecture.positions].embedding(architecture)
    norm = norm_parameters(architecture, "norm") if architecture.embedding_norm else ()
    embedding = (words, *positions, *token_type_parameters(architecture), *norm)
    last = architecture.num_layers + 4
    kinds = tuple(zip(architecture.attention, architecture.mlp, strict=True))
    blocks = {kind: _block_parameters(architecture, *kind) for kind in set(kinds)}
    shared = {p.name for p in POSITIONS[architecture.positions].shared(architecture)}
    holders = [i for i, kind in enumerate(kinds) if any(p.name in shared for p in blocks[kind])]

    def block(number: int, kind: tuple[str, str]) -> LayerEntry:
        parameters = blocks[kind]
        if number in holders[1:]:
            owner = BLOCK_OFFSET + holders[0]
            parameters = tuple(replace(p, shared_with=owner) if p.name in shared else p for p in parameters)
        return LayerEntry(BLOCK_OFFSET + number, "block", parameters)

    layers = (
        LayerEntry(0, "embedding", embedding),
        _prompt(architecture),
        *(block(number, kind) for number, kind in enumerate(kinds)),
        LayerEntry(last - 2, "identity"),
        LayerEntry(last - 1, "identity")
        if architecture.residual == "post_norm"
        else LayerEntry(last - 1, "norm", norm_parameters(architecture, "norm")),
        *_heads(architecture, words, last, 0 if head_parallelism == "column" else 1),
    )
    if architecture.soft_prompt_tokens:  # nothing else is trained
        layers = tuple(layer if layer.kind == "prompt" else _frozen(layer) for layer in layers)
    return LayerPlan(layers, architecture, padded_vocab_size)


def _prompt(architecture: Architecture) -> LayerEntry:
    if not (tokens := architecture.soft_prompt_tokens):
        return LayerEntry(1, "identity")
    shape = (tokens, architecture.hidden_size)
    return LayerEntry(1, "prompt", (ParameterSpec("soft_embedding_weight", shape, init="prompt"),))


def _frozen(layer: LayerEntry) -> LayerEntry:
    return replace(layer, parameters=tuple(replace(p, trained=False) for p in layer.parameters))


def _heads(architecture: Architecture, words: ParameterSpec, index: int, dim: int) -> tuple[LayerEntry, ...]:
    """Return the head and, of a bidirectional network that has it, the sentence head after it."""
    tied = 0 if architecture.tie_word_embeddings else None
    rows = words.shape[0]
    if architecture.bidirectional:
        head = LayerEntry(index, "masked_lm_head", masked_lm_head_parameters(architecture, rows), tied)
        if not architecture.sentence_head:
            return (head,)
        return head, LayerEntry(index + 1, "sentence_head", sentence_head_parameters(architecture))
    own: tuple[ParameterSpec, ...] = (replace(words, name="final_linear.weight", partition_dim=dim),)
    if architecture.head_bias:
        own += (ParameterSpec("final_linear.bias", (rows,), 0, init="zeros"),)
    return (LayerEntry(index, "head", () if tied is not None else own, tied),)


def _block_parameters(architecture: Architecture, attention: str, mlp: str) -> tuple[ParameterSpec, ...]:
    if attention in GATED_KINDS:
        return gated_block_parameters(architecture, attention)
    norms = BLOCK_NORMS[architecture.residual]
    shared = POSITIONS[architecture.positions].shared(architecture)
    return (
        *_slot_parameters(architecture, norms.before_attention),
        *ATTENTION[attention].parameters(architecture),
        *shared,
        *_slot_parameters(architecture, norms.after_attention),
        *_slot_parameters(architecture, norms.before_mlp),
        *MLPS[mlp].parameters(architecture),
        *_slot_parameters(architecture, norms.after_mlp),
    )


def _slot_parameters(architecture: Architecture, norm: str | None) -> tuple[ParameterSpec, ...]:
    if norm is None:
        return ()
    return norm_parameters(architecture, norm)
