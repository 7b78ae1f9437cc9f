"""Choices of a network on paper: norms, positions and MLPs, by their names in the YAML.

Each table's keys are the values that the YAML accepts. How a choice is computed is the entry of the same name in
`neox.ops` (`NORMS`) or `neox.model` (`POSITIONS`, `MLPS`). Kinds of blocks stand in `blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from neox.architecture.activations import ACTIVATIONS
from neox.architecture.architecture import Architecture
from neox.architecture.experts import expert_losses, expert_parameters, expert_statistics
from neox.architecture.parameter import ONES, ZEROS, FromKey, Normal, ParameterSpec, in_module


@dataclass(frozen=True)
class Norm:
    """A normalisation over the hidden dimension.

    Attributes:
        parameters: Hidden size -> parameters, named inside the norm.
        epsilon_key: Key of its epsilon in the YAML; None for a norm without one.
        by_steps: Whether it is computed in fp32 by single operations, which keep two fp32 tensors instead of its input.
        by_steps_on_cpu: Whether torch computes it so on CPUs, for which it has no kernel.
        of_heads: Whether gpt-neox's `use_qk_layernorm` can apply it to the heads of queries and keys.
        from_zero: Whether it multiplies by 1 + its scale, which begins at 0.
    """

    parameters: Callable[[int], tuple[ParameterSpec, ...]]
    epsilon_key: str | None = "layernorm_epsilon"
    by_steps: bool = False
    by_steps_on_cpu: bool = False
    of_heads: bool = False
    from_zero: bool = False


def _no_names(architecture: Architecture) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class MLPKind:
    """A kind of MLP in a block.

    Attributes:
        parameters: Network -> parameters, named inside the block.
        losses: Network -> names of the losses that it adds to the objective's.
        statistics: Network -> names of numbers that it reports with them, which are not trained.
    """

    parameters: Callable[[Architecture], tuple[ParameterSpec, ...]]
    losses: Callable[[Architecture], tuple[str, ...]] = _no_names
    statistics: Callable[[Architecture], tuple[str, ...]] = _no_names


def _none(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    return ()


@dataclass(frozen=True)
class Positions:
    """How positions enter the network.

    Attributes:
        rotates: Whether queries and keys are transformed, so that both forms are kept for the backward pass.
        biases_scores: Whether scores are changed, so that every kernel reads a number for each of them.
        embedding: Its parameters in layer 0, next to the word embeddings.
        shared: Its parameters that all blocks use, named inside each.
    """

    rotates: bool = False
    biases_scores: bool = False
    embedding: Callable[[Architecture], tuple[ParameterSpec, ...]] = _none
    shared: Callable[[Architecture], tuple[ParameterSpec, ...]] = _none


def norm_parameters(architecture: Architecture, module: str) -> tuple[ParameterSpec, ...]:
    """Return the parameters of one of the network's norms over hidden states, as those of a module."""
    return in_module(module, NORMS[architecture.norm].parameters(architecture.hidden_size))


def row_parallel_bias(name: str, architecture: Architecture) -> ParameterSpec:
    """Return the bias of a linear layer whose input is split over tensor ranks: one copy, added after the reduction."""
    shape = (architecture.hidden_size,)
    return ParameterSpec(name, shape, init=ZEROS, summed_in_neox=architecture.parallel_residual)


def _layernorm(hidden: int) -> tuple[ParameterSpec, ...]:
    return (
        ParameterSpec("weight", (hidden,), init=ONES),
        ParameterSpec("bias", (hidden,), init=ZEROS),
    )


def _layernorm_weight(hidden: int) -> tuple[ParameterSpec, ...]:
    return (ParameterSpec("weight", (hidden,), init=ONES),)


def _scale_minus_one(hidden: int) -> tuple[ParameterSpec, ...]:
    return (ParameterSpec("scale", (hidden,), init=ZEROS),)


def _scale(hidden: int) -> tuple[ParameterSpec, ...]:
    return (ParameterSpec("scale", (hidden,), init=ONES),)


def _length(hidden: int) -> tuple[ParameterSpec, ...]:
    return (ParameterSpec("g", (1,), init=ONES),)


def _mlp(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Two products. The rows of a gated activation's first one are those that are multiplied, then the gates."""
    hidden = architecture.hidden_size
    width = architecture.mlp_width
    factor = ACTIVATIONS[architecture.activation].width_factor
    rows = width * factor
    sections: tuple[int, ...] = ()
    if factor > 1:
        sections = (width,) * factor
    first = [ParameterSpec("mlp.dense_h_to_4h.weight", (rows, hidden), 0, sections=sections)]
    last = [ParameterSpec("mlp.dense_4h_to_h.weight", (hidden, width), 1, init=FromKey.OUTPUT_METHOD)]
    if architecture.mlp_bias:
        first.append(ParameterSpec("mlp.dense_h_to_4h.bias", (rows,), 0, init=ZEROS, sections=sections))
        last.append(row_parallel_bias("mlp.dense_4h_to_h.bias", architecture))
    return (*first, *last)


def _learned_positions(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    return (ParameterSpec("position_embeddings.weight", (architecture.max_positions, architecture.hidden_size)),)


NORMS: Mapping[str, Norm] = MappingProxyType(
    {
        "layernorm": Norm(_layernorm, of_heads=True),
        "rmsnorm": Norm(_scale, "rms_norm_epsilon", by_steps_on_cpu=True, of_heads=True),
        "rmsnorm_1p": Norm(_scale_minus_one, "rms_norm_epsilon", by_steps_on_cpu=True, from_zero=True),
        "layernorm_no_bias": Norm(_layernorm_weight),
        "rmsnorm_v2.0": Norm(_scale, "rms_norm_epsilon", by_steps=True),
        "scalenorm": Norm(_length, "scalenorm_epsilon", by_steps=True),
        "non_parametric_layernorm": Norm(lambda hidden: ()),
    }
)
TRANSFORMER_ENGINE_NORMS: Mapping[str, str] = MappingProxyType({"te_layernorm": "layernorm", "te_rmsnorm": "rmsnorm"})
"""Names of Transformer Engine's norms -> the norms that they compute."""


def _relative_positions(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    shape = (architecture.rpe_buckets, architecture.num_attention_heads)
    xavier = Normal(sqrt(2.0 / sum(shape)))
    return (ParameterSpec("attention.rpe.weight", shape, 1, init=xavier, looked_up=True),)


POSITIONS: Mapping[str, Positions] = MappingProxyType(
    {
        "learned": Positions(embedding=_learned_positions),
        "rotary": Positions(rotates=True),
        "sinusoidal": Positions(),
        "rpe": Positions(biases_scores=True, shared=_relative_positions),
        "alibi": Positions(biases_scores=True),
        "none": Positions(),
    }
)
MLPS: Mapping[str, MLPKind] = MappingProxyType(
    {"dense": MLPKind(_mlp), "experts": MLPKind(expert_parameters, expert_losses, expert_statistics)}
)


def block_losses(architecture: Architecture) -> tuple[str, ...]:
    """Return the names of the losses that the network's blocks add to the objective's."""
    names: dict[str, None] = {}
    for kind in architecture.mlp:
        names.update(dict.fromkeys(MLPS[kind].losses(architecture)))
    return tuple(names)


def block_statistics(architecture: Architecture) -> tuple[str, ...]:
    """Return the names of the numbers that the network's blocks report next to losses."""
    names: dict[str, None] = {}
    for kind in architecture.mlp:
        names.update(dict.fromkeys(MLPS[kind].statistics(architecture)))
    return tuple(names)


if TYPE_CHECKING:
    ActivationName: TypeAlias = str
    NormName: TypeAlias = str
    PositionsName: TypeAlias = str
else:
    ActivationName = Literal[tuple(ACTIVATIONS)]
    NormName = Literal[(*NORMS, *TRANSFORMER_ENGINE_NORMS)]
    PositionsName = Literal[tuple(POSITIONS)]
