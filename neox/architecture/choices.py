"""Choices of a network on paper: activations, norms, positions and attention, by their names in the YAML.

Each table's keys are the values that the YAML accepts. How a choice is computed is the entry of the same name in
`neox.ops` (`ACTIVATIONS`, `NORMS`) or `neox.model` (`POSITIONS`, `ATTENTION`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from neox.architecture.architecture import Architecture
from neox.architecture.parameter import ParameterSpec
from neox.architecture.sparsity import SPARSITY


@dataclass(frozen=True)
class Activation:
    """An MLP activation.

    Attributes:
        width_factor: Width of its input as a multiple of its output: 2 where one half gates the other.
    """

    width_factor: int = 1


@dataclass(frozen=True)
class Norm:
    """A normalisation over the hidden dimension.

    Attributes:
        parameters: Hidden size -> parameters, named inside the norm.
    """

    parameters: Callable[[int], tuple[ParameterSpec, ...]]


def _none(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    return ()


@dataclass(frozen=True)
class Positions:
    """How positions enter the network.

    Attributes:
        rotates: Whether queries and keys are transformed, so that both forms are kept for the backward pass.
        biases_scores: Whether scores are changed, so that every kernel reads a number for each of them.
        embedding: Its parameters beside the word embeddings, in layer 0.
    """

    rotates: bool = False
    biases_scores: bool = False
    embedding: Callable[[Architecture], tuple[ParameterSpec, ...]] = _none


@dataclass(frozen=True)
class Attention:
    """The attention of one block.

    Attributes:
        parameters: Its parameters, named inside the block.
        keys_per_query: Sequence length -> keys that one query is multiplied with, a causal mask not subtracted (as
            Megatron-LM counts, arXiv:2104.04473).
    """

    parameters: Callable[[Architecture], tuple[ParameterSpec, ...]]
    keys_per_query: Callable[[int], int]


def row_parallel_bias(name: str, architecture: Architecture) -> ParameterSpec:
    """Return the bias of a linear layer whose input is split over tensor ranks: one copy, added after the reduction."""
    shape = (architecture.hidden_size,)
    return ParameterSpec(name, shape, init="zeros", summed_in_neox=architecture.parallel_residual)


def _layernorm(hidden: int) -> tuple[ParameterSpec, ...]:
    return (
        ParameterSpec("weight", (hidden,), init="ones"),
        ParameterSpec("bias", (hidden,), init="zeros"),
    )


def _scale(hidden: int) -> tuple[ParameterSpec, ...]:
    return (ParameterSpec("scale", (hidden,), init="ones"),)


def _self_attention(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Fused projection with rows [heads, 3, head_dim] and output projection, both with bias."""
    h = architecture.hidden_size
    return (
        ParameterSpec("attention.query_key_value.weight", (3 * h, h), 0),
        ParameterSpec("attention.query_key_value.bias", (3 * h,), 0, init="zeros"),
        ParameterSpec("attention.dense.weight", (h, h), 1, init="output_weight"),
        row_parallel_bias("attention.dense.bias", architecture),
    )


def _learned_positions(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    return (ParameterSpec("position_embeddings.weight", (architecture.max_positions, architecture.hidden_size)),)


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({"gelu": Activation(), "gelu_tanh": Activation()})
NORMS: Mapping[str, Norm] = MappingProxyType(
    {
        "layernorm": Norm(_layernorm),
        "rmsnorm": Norm(_scale),
        "rmsnorm_v2.0": Norm(_scale),
        "scalenorm": Norm(lambda hidden: (ParameterSpec("g", (1,), init="ones"),)),
        "non_parametric_layernorm": Norm(lambda hidden: ()),
    }
)
POSITIONS: Mapping[str, Positions] = MappingProxyType(
    {
        "learned": Positions(embedding=_learned_positions),
        "rotary": Positions(rotates=True),
        "sinusoidal": Positions(),
        "alibi": Positions(biases_scores=True),
        "none": Positions(),
    }
)
_SELF_ATTENTION = Attention(_self_attention, lambda length: length)  # sparse kinds mask a dense product
ATTENTION: Mapping[str, Attention] = MappingProxyType(dict.fromkeys(("global", *SPARSITY), _SELF_ATTENTION))

if TYPE_CHECKING:
    ActivationName: TypeAlias = str
    NormName: TypeAlias = str
    PositionsName: TypeAlias = str
else:
    ActivationName = Literal[tuple(ACTIVATIONS)]
    NormName = Literal[(*NORMS, "te_layernorm", "te_rmsnorm")]
    PositionsName = Literal[tuple(POSITIONS)]
