"""Kind `gated_delta` on paper: Gated DeltaNet (arXiv:2412.06464), as in Qwen3-Next and OLMo's hybrids, and an MLP.

Legend: H hidden, G heads of queries and keys, N heads of values, K width of a key, V width of a value, c tokens of a
chunk.
"""

from __future__ import annotations

from neox.architecture.architecture import Architecture
from neox.architecture.block_kind import MicroBatch
from neox.architecture.kernels import DELTA_CHUNK
from neox.architecture.parameter import ONES, FromKey, LogUniform, ParameterSpec, StepSizes
from neox.architecture.recurrence import FP32, Mixer, StateShapes, convolution_parameters


def _parameters(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """List the parameters. Tensor ranks divide the heads.

    Rows of the input projection: G K of queries, G K of keys, N V of values, N V of gates, N of strengths, N of decays.
    The convolution has a channel for each query, key and value.
    """
    hidden = architecture.hidden_size
    heads = architecture.linear_value_heads
    keys = architecture.linear_key_heads * architecture.linear_key_dim
    values = heads * architecture.linear_value_dim
    rows = (keys, keys, values, values, heads, heads)
    return (
        ParameterSpec("dt_bias", (heads,), 0, init=StepSizes(0.001, 0.1), stays_fp32=True),
        ParameterSpec("A_log", (heads,), 0, init=LogUniform(0.01, 16.0), stays_fp32=True),
        ParameterSpec("in_proj.weight", (sum(rows), hidden), 0, sections=rows),
        *convolution_parameters((keys, keys, values), architecture.linear_conv),
        ParameterSpec("norm.scale", (architecture.linear_value_dim,), init=ONES),
        ParameterSpec("out_proj.weight", (hidden, values), 1, init=FromKey.OUTPUT_METHOD),
    )


def _state(architecture: Architecture, tp_size: int) -> StateShapes:
    """Return the last inputs of the convolution, and a matrix [K, V] of each head."""
    heads = architecture.linear_value_heads // tp_size
    keys = architecture.linear_key_heads // tp_size * architecture.linear_key_dim
    return (
        (architecture.linear_conv - 1, 2 * keys + heads * architecture.linear_value_dim),
        (heads, architecture.linear_key_dim, architecture.linear_value_dim),
    )


def _flops(architecture: Architecture) -> int:
    """Return the operations of the recurrence for one token.

    In each head 2 K V to read the key, to write, and to read the query.
    """
    return 6 * architecture.linear_value_heads * architecture.linear_key_dim * architecture.linear_value_dim


def _activations(architecture: Architecture, batch: MicroBatch) -> int:
    """Return the bytes that are kept: the input projection's result, and the output projection's input."""
    heads = architecture.linear_value_heads
    keys = architecture.linear_key_heads * architecture.linear_key_dim
    values = heads * architecture.linear_value_dim
    widths = 2 * keys + 3 * values + 2 * heads
    return batch.tokens * widths * batch.bytes_per_number // batch.tp_size


def _recomputed(architecture: Architecture, batch: MicroBatch) -> int:
    """Return the bytes of everything between the two projections at the peak of its backward pass, which is fp32.

    Of a token 12 tensors of G K, 1.5 of N K and 10.5 of N V, 6.5 numbers for each head and token of its chunk, and
    twice its share of a state [K, V] of each head and chunk, with documents in a row too. Measured, to 3 % for keys of
    32 to 128 channels.
    """
    heads = architecture.linear_value_heads
    keys = architecture.linear_key_heads * architecture.linear_key_dim
    values = heads * architecture.linear_value_dim
    chunk = min(DELTA_CHUNK, batch.sequence)
    halves = 24 * keys + 3 * heads * architecture.linear_key_dim + 21 * values + 13 * heads * chunk
    elements = halves // 2 + 2 * values * architecture.linear_key_dim // chunk
    return batch.tokens * elements * FP32 // batch.tp_size


def _obstacle(architecture: Architecture, tp_size: int) -> str:
    """Return why tensor ranks cannot divide heads."""
    if architecture.linear_key_heads % tp_size == 0:
        return ""
    return f"linear_num_key_heads is {architecture.linear_key_heads}, which is no multiple of that"


GATED_DELTA = Mixer(
    parameters=_parameters,
    state=_state,
    mixing_flops=_flops,
    activations=_activations,
    recomputed=_recomputed,
    residual=lambda architecture: architecture.linear_residual or architecture.residual,
    obstacle=_obstacle,
    refused=("use_mup", "soft_prompt_tuning"),
)
