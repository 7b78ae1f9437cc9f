"""Blocks with a recurrent state instead of attention."""

from __future__ import annotations

from typing import Annotated, Literal

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith
from neox.config.sections.numbers import PositiveFloat, PositiveInt

_MAMBA2 = OnlyWith("attention_config", ("mamba2", "mamba2_mlp"))
_MAMBA1 = OnlyWith("attention_config", ("mamba",))
_MAMBA = OnlyWith("attention_config", ("mamba", "mamba2", "mamba2_mlp"))

_SELECTIVE = OnlyWith("attention_config", ("mamba", "mamba2", "mamba2_mlp", "gated_delta"))
_DELTA = OnlyWith("attention_config", ("gated_delta",))
_RWKV = OnlyWith("attention_config", ("rwkv",))


class RecurrentConfig(Section):
    """Blocks with a recurrent state instead of attention: Mamba, gated linear attention, RWKV."""

    mamba_num_heads: Annotated[PositiveInt | None, _MAMBA2] = None
    """Number of heads in `mamba2` blocks, by default 2 x hidden_size / mamba_head_dim. A multiple of
    model_parallel_size. Megatron-LM's name, as the next three."""

    mamba_head_dim: Annotated[PositiveInt, _MAMBA2] = 64
    """Channels of one of these heads."""

    mamba_num_groups: Annotated[PositiveInt, _MAMBA2] = 1
    """Number of groups of heads that share the vectors B and C. Divides mamba_num_heads; 1, or a multiple of
    model_parallel_size. The norm of a block's output is over the channels of each group."""

    mamba_state_dim: Annotated[PositiveInt | None, _MAMBA] = None
    """Elements of the state of one channel, by default 16 in `mamba` blocks (gpt-neox) and 128 in `mamba2` blocks. A
    network with both needs it."""

    mamba_width: Annotated[PositiveInt | None, _MAMBA1] = None
    """Channels of `mamba` blocks, a multiple of model_parallel_size. By default intermediate_size or expansion_factor
    give them, as in gpt-neox; without any of the three they are 2 x hidden_size."""

    mamba_dt_rank: Annotated[PositiveInt | None, _MAMBA1] = None
    """Width of the vector from which the steps of all channels are computed in these blocks, by default hidden_size /
    16, rounded up (gpt-neox)."""

    mamba_conv_width: Annotated[PositiveInt, _MAMBA] = 4
    """Tokens that the convolution in front of the recurrence sees, with the newest one."""

    mamba_use_bias_in_conv: Annotated[bool, _MAMBA] = True
    """Add a bias to that convolution."""

    mamba_use_bias_in_linears: Annotated[bool, _MAMBA] = False
    """Add biases to the input and output projections of blocks of Mamba; in `mamba` blocks also to that of B, C and the
    steps, as in gpt-neox."""

    mamba_selective_fp32_params: Annotated[bool, _SELECTIVE] = True
    """Let blocks of Mamba and `gated_delta` compute with the fp32 values of `A_log`, `D` and `dt_bias` when training in
    16 bits: decays and steps are exponentials of them. In gpt-neox these are A_log and D of `mamba` blocks. Files of
    layers hold the fp32 values; data ranks gather them after each step. Off by default, and refused if given, where
    memory holds no fp32 weights: with bf16_master_weights_and_grads, and with optimizer states in files. Not with
    `reference_model: copy`."""

    linear_num_key_heads: Annotated[PositiveInt, _DELTA] = 16
    """Number of heads of queries and keys in `gated_delta` blocks, a multiple of model_parallel_size. The names and
    defaults of these keys are those of Megatron-LM and transformers."""

    linear_num_value_heads: Annotated[PositiveInt, _DELTA] = 32
    """Number of heads of values in these blocks, a multiple of linear_num_key_heads."""

    linear_key_head_dim: Annotated[PositiveInt, _DELTA] = 128
    """Width of a head's queries and keys in these blocks."""

    linear_value_head_dim: Annotated[PositiveInt, _DELTA] = 128
    """Width of a head's values in these blocks."""

    linear_conv_kernel_dim: Annotated[PositiveInt, _DELTA] = 4
    """Tokens that the convolution of queries, keys and values sees in these blocks, with the newest one."""

    linear_allow_neg_eigval: Annotated[bool, _DELTA] = False
    """Let writes in these blocks have up to twice the strength, so that a state can change its sign (OLMo Hybrid)."""

    linear_norm_epsilon: Annotated[PositiveFloat | None, _DELTA] = None
    """Epsilon of the norm of a head's outputs in these blocks, by default that of the network's norm, or 1e-6 if it has
    none."""

    linear_norm_placement: Annotated[
        Literal["input", "output", "both"] | None,
        _DELTA,
        Excludes("gpt_j_residual", reason="a parallel residual has its norms before both sublayers"),
    ] = None
    """What is normalised in these blocks, by default what norm_placement says (OLMo Hybrid: `input`, and `output` in
    blocks with attention)."""

    dim_att: Annotated[PositiveInt | None, _RWKV] = None
    """Width of time mixing in `rwkv` blocks, a multiple of head_size; by default hidden_size. gpt-neox's name, as the
    next two."""

    head_size: Annotated[PositiveInt | None, _RWKV] = None
    """Channels of one head of time mixing in these blocks, by default dim_att / num_attention_heads, or 64 without that
    key. The number of heads is a multiple of model_parallel_size."""

    ffn_dim: Annotated[PositiveInt | None, _RWKV] = None
    """Width of channel mixing in these blocks, a multiple of model_parallel_size. By default intermediate_size, or
    expansion_factor (here 3.5) x hidden_size, rounded down to a multiple of 32 as in gpt-neox."""
