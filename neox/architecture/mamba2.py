"""Kinds `mamba2` and `mamba2_mlp` on paper: state space duality (Mamba-2, arXiv:2405.21060).

Legend: H hidden, N heads, P head dim, F = N P channels, G groups, D state dim, K width of the convolution.
"""

from __future__ import annotations

from neox.architecture.architecture import Architecture
from neox.architecture.block_kind import MicroBatch
from neox.architecture.parameter import ONES, FromKey, LogUniform, ParameterSpec, StepSizes
from neox.architecture.recurrence import FP32, Mixer, StateShapes, convolution_parameters, linear_parameters

CHUNK = 64
"""Tokens of a chunk of the parallel scan, whose pairs are multiplied with each other."""

EPSILON = 1e-5
"""Epsilon of the gated norm, if the network's norm has none."""


def _parameters(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """List the parameters. Rows of the input projection: F gates, F inputs, G D of B, G D of C, N steps.

    Tensor ranks divide the heads. Each computes a part of B and of C: that of its own groups, or one to be joined with
    the others' if there is one group only.
    """
    hidden = architecture.hidden_size
    heads = architecture.mamba_heads
    channels = heads * architecture.mamba_head_dim
    states = architecture.mamba_groups * architecture.mamba_state
    rows = (channels, channels, states, states, heads)
    convolved = (channels, states, states)
    has_bias = architecture.mamba_linear_bias
    return (
        ParameterSpec("dt_bias", (heads,), 0, init=StepSizes(0.001, 0.1), stays_fp32=True),
        ParameterSpec("A_log", (heads,), 0, init=LogUniform(1.0, 16.0), stays_fp32=True),
        ParameterSpec("D", (heads,), 0, init=ONES, stays_fp32=True),
        *linear_parameters("in_proj", (sum(rows), hidden), 0, has_bias=has_bias, sections=rows),
        *convolution_parameters(convolved, architecture.mamba_conv, has_bias=architecture.mamba_conv_bias),
        ParameterSpec("norm.scale", (channels,), 0, init=ONES),
        *linear_parameters("out_proj", (hidden, channels), 1, has_bias=has_bias, init=FromKey.OUTPUT_METHOD),
    )


def _state(architecture: Architecture, tp_size: int) -> StateShapes:
    """Return the last inputs of the convolution, [K - 1, channels], and a matrix [P, D] of each head."""
    heads = architecture.mamba_heads // tp_size
    states = architecture.mamba_groups * architecture.mamba_state // tp_size
    convolved = heads * architecture.mamba_head_dim + 2 * states
    return (
        (architecture.mamba_conv - 1, convolved),
        (heads, architecture.mamba_head_dim, architecture.mamba_state),
    )


def _flops(architecture: Architecture) -> int:
    """Return the operations of the recurrence for one token: 2 for each element of the states to add, and 2 to read."""
    return 4 * architecture.mamba_heads * architecture.mamba_head_dim * architecture.mamba_state


def _activations(architecture: Architecture, batch: MicroBatch) -> int:
    """Return the bytes of the mixer's activations: both results of its projections' products, F for the second one."""
    heads = architecture.mamba_heads
    channels = heads * architecture.mamba_head_dim
    states = architecture.mamba_groups * architecture.mamba_state
    widths = 2 * channels + 2 * states + heads + channels
    return batch.tokens * widths * batch.bytes_per_number // batch.tp_size


def _recomputed(architecture: Architecture, batch: MicroBatch) -> int:
    """Return the bytes of everything between the two projections at the peak of its backward pass, all fp32.

    Of a token 11.8 tensors of F, 7 of G D, 2.3 numbers for CHUNK pairs of each head, and 2.9 times its share of the
    states of a chunk, with documents in a row too. Measured, to 8 % for heads of 16 to 128 channels and states of 16 to
    256: which tensors are held at the peak depends on them.
    """
    heads = architecture.mamba_heads
    channels = heads * architecture.mamba_head_dim
    states = architecture.mamba_groups * architecture.mamba_state
    pairs = heads * CHUNK
    of_chunks = channels * architecture.mamba_state // CHUNK
    elements = 11.8 * channels + 7.2 * states + 2.3 * pairs + 2.9 * of_chunks
    return int(batch.tokens * elements) * FP32 // batch.tp_size


def _obstacle(architecture: Architecture, tp_size: int) -> str:
    """Return why tensor ranks cannot divide groups: whole groups for each rank, or one group for all."""
    groups = architecture.mamba_groups
    if groups == 1 or groups % tp_size == 0:
        return ""
    return f"mamba_num_groups is {groups}, which is neither 1 nor a multiple of that"


MAMBA2 = Mixer(
    parameters=_parameters,
    state=_state,
    mixing_flops=_flops,
    activations=_activations,
    recomputed=_recomputed,
    obstacle=_obstacle,
    uses=("residual_multiplier", "hidden_dropout"),
    refused=("use_mup", "soft_prompt_tuning"),
)
