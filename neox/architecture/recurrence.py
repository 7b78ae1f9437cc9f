"""Recurrent mixers on paper: what takes attention's place in a block, and keeps a state instead of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from neox.architecture.architecture import Architecture
from neox.architecture.block_kind import BlockKind, MicroBatch
from neox.architecture.choices import MLPS, norm_parameters
from neox.architecture.parameter import ZEROS, FromKey, InitialValues, ParameterSpec, Uniform, in_module
from neox.architecture.residual import RESIDUALS

FP32 = 4
"""Bytes of an element of a state, and of what recurrences compute."""

SELECTIVE_FP32 = ("A_log", "D", "dt_bias")
"""Parameters of mixers that stay fp32 in every precision: decays and steps are exponentials of them."""

StateShapes = tuple[tuple[int, ...], ...]
"""Shapes of the tensors of one sequence's state on a tensor rank, which are fp32."""


def _divides(architecture: Architecture, tp_size: int) -> str:
    return ""


def _of_network(architecture: Architecture) -> str:
    return architecture.residual


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """A recurrence over tokens.

    Attributes:
        parameters: Network -> its parameters, named inside the mixer.
        state: (network, tensor ranks) -> shapes of its state.
        mixing_flops: Network -> operations of a forward pass for one token that its matrices do not show.
        activations: (network, micro batch) -> bytes that it keeps for its backward pass, without its input.
        recomputed: (network, micro batch) -> bytes that its backward pass computes again at once.
        obstacle: (network, tensor ranks) -> why these cannot divide it, as a clause; empty if they can, or if the
            shapes of its parameters say so.
        residual: Network -> key of `RESIDUALS` in blocks of the mixer and an MLP.
        uses: Keys that other blocks without attention, or without an MLP, do not use, and this mixer does.
        refused: Keys that do not work with it.
    """

    parameters: Callable[[Architecture], tuple[ParameterSpec, ...]]
    state: Callable[[Architecture, int], StateShapes]
    mixing_flops: Callable[[Architecture], int]
    activations: Callable[[Architecture, MicroBatch], int]
    recomputed: Callable[[Architecture, MicroBatch], int]
    obstacle: Callable[[Architecture, int], str] = _divides
    residual: Callable[[Architecture], str] = _of_network
    uses: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def selective_fp32(parameters: Iterable[ParameterSpec]) -> list[ParameterSpec]:
    """Return those parameters of a layer that stay fp32 because mixers compute decays and steps from them."""
    return [spec for spec in parameters if spec.stays_fp32 and spec.name.rpartition(".")[2] in SELECTIVE_FP32]


def linear_parameters(
    module: str,
    shape: tuple[int, int],
    partition_dim: int,
    *,
    has_bias: bool,
    init: InitialValues = FromKey.METHOD,
    sections: tuple[int, ...] = (),
) -> tuple[ParameterSpec, ...]:
    """Return the weight [O, I] of a linear layer that tensor ranks divide, and its bias if it has one.

    Args:
        module: Name of the layer.
        shape: Shape of the weight.
        partition_dim: Its dimension that is divided: 0 for outputs, with the bias, or 1 for inputs.
        has_bias: Whether there is a bias.
        init: Initial values of the weight.
        sections: As of `ParameterSpec`.
    """
    weight = ParameterSpec(f"{module}.weight", shape, partition_dim, init=init, sections=sections)
    if not has_bias:
        return (weight,)
    bias = ParameterSpec(f"{module}.bias", shape[:1], init=ZEROS)
    if partition_dim == 0:
        bias = replace(bias, partition_dim=0, sections=sections)
    return (weight, bias)


def convolution_parameters(
    channels: tuple[int, ...], width: int, *, has_bias: bool = False
) -> tuple[ParameterSpec, ...]:
    """Return the taps [channels, 1, width] of a convolution over tokens, and a bias. Tensor ranks divide the channels.

    Args:
        channels: Numbers of channels of what is convolved, one after another; each is divided by itself.
        width: Number of taps.
        has_bias: Whether there is a bias.
    """
    bound = width**-0.5
    init = Uniform(-bound, bound)
    sections = channels if len(channels) > 1 else ()
    number = sum(channels)
    taps = ParameterSpec("conv1d.weight", (number, 1, width), 0, init=init, sections=sections, of_recurrence=True)
    if not has_bias:
        return (taps,)
    return (taps, ParameterSpec("conv1d.bias", (number,), 0, init=init, sections=sections))


def _is_behind_mixing(parameter: str) -> bool:
    """Return whether a parameter is used behind the recurrence: the output projection's, or the MLP's."""
    return parameter.startswith(("mixer.out_proj.", "mlp."))


def recurrent_block(mixer: Mixer, second: Literal["nothing", "mlp"]) -> BlockKind:
    """Return the row of a block with a recurrent mixer.

    Args:
        mixer: The mixer.
        second: The second sublayer: `nothing`, so that the block is x + mixer(norm(x)) as in Mamba, or the network's
            MLP or experts, which are added by the network's residual rule.
    """
    has_mlp = second == "mlp"

    def parameters(architecture: Architecture, mlp: str) -> tuple[ParameterSpec, ...]:
        mixing = in_module("mixer", mixer.parameters(architecture))
        if not has_mlp:
            return (*norm_parameters(architecture, "norm"), *mixing)
        norms = RESIDUALS[mixer.residual(architecture)].norms

        def norm(module: str | None) -> tuple[ParameterSpec, ...]:
            return () if module is None else norm_parameters(architecture, module)

        return (
            *norm(norms.before_attention),
            *mixing,
            *norm(norms.after_attention),
            *norm(norms.before_mlp),
            *MLPS[mlp].parameters(architecture),
            *norm(norms.after_mlp),
        )

    def activations(architecture: Architecture, batch: MicroBatch) -> int:
        of_mixer = mixer.activations(architecture, batch)
        if has_mlp:
            return of_mixer
        of_element = 2 * batch.bytes_per_number + batch.norm_bytes  # the block's input, and the norm's output
        return of_mixer + batch.tokens * architecture.hidden_size * of_element // batch.token_shares

    def unkept_product(architecture: Architecture, mlp: str) -> str:
        if not has_mlp:
            return "mixer.out_proj.weight"
        return RESIDUALS[mixer.residual(architecture)].unkept_product(mlp)

    def recomputed_flops(architecture: Architecture, sequence: int) -> int:
        matrices = sum(spec.numel for spec in mixer.parameters(architecture) if spec.is_matrix and spec.of_recurrence)
        return 2 * matrices + mixer.mixing_flops(architecture)

    return BlockKind(
        parameters=parameters,
        two_sublayers=has_mlp,
        keeps="state",
        kept=lambda architecture, tp_size: sum(map(prod, mixer.state(architecture, tp_size))),
        mixing_flops=lambda architecture, _: mixer.mixing_flops(architecture),
        activations=activations,
        recomputed=mixer.recomputed,
        recomputed_flops=recomputed_flops,
        unkept_product=unkept_product,
        behind_recomputed=_is_behind_mixing,
        obstacle=mixer.obstacle,
        residual=mixer.residual,
        context_ranks="whose states go from token to token",
        uses=mixer.uses,
        refused=mixer.refused,
    )
