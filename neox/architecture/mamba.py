"""Kind `mamba` on paper: selective state spaces (Mamba, arXiv:2312.00752), with gpt-neox's names.

Legend: H hidden, F channels, D state dim, K width of the convolution, R width of the steps before their projection.
"""

from __future__ import annotations

from neox.architecture.architecture import Architecture
from neox.architecture.block_kind import MicroBatch
from neox.architecture.parameter import ONES, ZEROS, FromKey, LogCounts, ParameterSpec, StepSizes, Uniform
from neox.architecture.recurrence import FP32, Mixer, StateShapes, convolution_parameters, linear_parameters

CHUNK = 32
"""Tokens whose states are in memory at once."""


def _parameters(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """List the parameters. Rows of the input projection: F inputs, F gates; of `x_proj`: R steps, D of B, D of C.

    Tensor ranks divide the channels. `x_proj` sums over channels, so over ranks; all compute with the same B and C.
    """
    hidden = architecture.hidden_size
    channels = architecture.mamba_width
    states = architecture.mamba_state
    steps = architecture.mamba_dt_rank
    selection = [ParameterSpec("x_proj.weight", (steps + 2 * states, channels), 1, of_recurrence=True)]
    has_bias = architecture.mamba_linear_bias
    if has_bias:
        selection.append(ParameterSpec("x_proj.bias", (steps + 2 * states,), init=ZEROS))
    step_bound = steps**-0.5
    step_weight = ParameterSpec(
        "dt_proj.weight", (channels, steps), 0, init=Uniform(-step_bound, step_bound), of_recurrence=True
    )
    return (
        ParameterSpec("A_log", (channels, states), 0, init=LogCounts(), of_norm=True, stays_fp32=True),
        ParameterSpec("D", (channels,), 0, init=ONES, stays_fp32=True),
        *linear_parameters("in_proj", (2 * channels, hidden), 0, has_bias=has_bias, sections=(channels, channels)),
        *convolution_parameters((channels,), architecture.mamba_conv, has_bias=architecture.mamba_conv_bias),
        *selection,
        step_weight,
        ParameterSpec("dt_proj.bias", (channels,), 0, init=StepSizes(0.001, 0.1)),
        *linear_parameters("out_proj", (hidden, channels), 1, has_bias=has_bias, init=FromKey.OUTPUT_METHOD),
    )


def _state(architecture: Architecture, tp_size: int) -> StateShapes:
    """Return the last inputs of the convolution, [K - 1, F], and the state of each channel, [F, D]."""
    channels = architecture.mamba_width // tp_size
    return ((architecture.mamba_conv - 1, channels), (channels, architecture.mamba_state))


def _flops(architecture: Architecture) -> int:
    """Return the operations of the recurrence for one token: 2 for each element of the states to add, and 2 to read."""
    return 4 * architecture.mamba_width * architecture.mamba_state


def _activations(architecture: Architecture, batch: MicroBatch) -> int:
    """Return the bytes of what the mixer keeps: 2 F of the input projection, and F for the output projection."""
    return batch.tokens * 3 * architecture.mamba_width * batch.bytes_per_number // batch.tp_size


def _recomputed(architecture: Architecture, batch: MicroBatch) -> int:
    """Return the bytes of everything between the two projections at the peak of its backward pass, fp32.

    Of a token 10.2 tensors of F, and its share of the states at the ends of chunks and of their gradient. Of one chunk
    decays, states, gradients and a product of these, 4.3 times the states. Measured, to 3 % for states of 8 to 64.
    """
    channels = architecture.mamba_width // batch.tp_size
    states = channels * architecture.mamba_state
    of_tokens = batch.tokens * (51 * channels // 5 + 2 * states // CHUNK)
    of_chunk = 13 * (batch.tokens // batch.sequence) * min(CHUNK, batch.sequence) * states // 3
    return (of_tokens + of_chunk) * FP32


MAMBA = Mixer(
    parameters=_parameters,
    state=_state,
    mixing_flops=_flops,
    activations=_activations,
    recomputed=_recomputed,
    uses=("residual_multiplier", "hidden_dropout", "intermediate_size", "expansion_factor"),
    refused=("use_mup", "soft_prompt_tuning"),
)
