"""Blocks with a recurrent state instead of attention."""

from __future__ import annotations

from typing import Annotated

from neox.config.sections.base import Section
from neox.config.sections.conditions import OnlyWith
from neox.config.sections.numbers import PositiveInt

_MAMBA2 = OnlyWith("attention_config", ("mamba2", "mamba2_mlp"))
_MAMBA1 = OnlyWith("attention_config", ("mamba",))
_MAMBA = OnlyWith("attention_config", ("mamba", "mamba2", "mamba2_mlp"))


class RecurrentConfig(Section):
    """Blocks with a recurrent state instead of attention: Mamba."""

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
