"""Table of the YAML keys that the fields of recurrent blocks are read from, and written as."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from neox.architecture import Architecture
from neox.plan.network.attention_config import attention_kinds
from neox.plan.network.field_keys import FieldKeys, Keys, same, unless_default
from neox.plan.network.norm_keys import EPSILONS, RESIDUAL_OF_PLACEMENT, read_epsilon

_PATTERN: Final = ("attention_config", "num_layers")
MAMBA2_KINDS: Final = ("mamba2", "mamba2_mlp")
_MAMBA_KINDS: Final = ("mamba", *MAMBA2_KINDS)
_STATES: Final = MappingProxyType({"mamba": 16, "mamba2": 128, "mamba2_mlp": 128})
"""Kind -> elements of the state of a channel, if no key says so."""
DELTA_KINDS: Final = ("gated_delta",)
SELECTIVE_FP32_KINDS: Final = (*_MAMBA_KINDS, *DELTA_KINDS)
"""Kinds with parameters that stay fp32."""
_DELTA_EPSILON: Final = 1e-6
RWKV_KINDS: Final = ("rwkv",)
_RWKV_HEAD: Final = 64
_RWKV_MLP_UNIT: Final = 32


def _row(
    kinds: tuple[str, ...],
    keys: tuple[str, ...],
    absent: Any,
    read: Callable[..., Any] = same,
    write: Callable[[Architecture], Keys] = lambda network: {},
) -> FieldKeys:
    """Return the row of a field that only networks with some kinds of blocks have.

    Args:
        kinds: The kinds.
        keys: Keys that the field follows from.
        absent: Value of the field in other networks.
        read: Values of `keys` -> the field's value.
        write: Network with such blocks -> the keys that this field adds.
    """

    def read_if_present(attention_config: Any, num_layers: int, *values: Any) -> Any:
        if set(attention_kinds(attention_config, num_layers)).isdisjoint(kinds):
            return absent
        return read(*values)

    def write_if_present(network: Architecture) -> Keys:
        if set(network.attention).isdisjoint(kinds):
            return {}
        return write(network)

    return FieldKeys((*_PATTERN, *keys), read_if_present, write_if_present, later=keys)


def _value(kinds: tuple[str, ...], key: str, field: str, absent: Any, default: Any) -> FieldKeys:
    """Return the row of a field that is the value of one key.

    Args:
        kinds: The kinds of blocks that have it.
        key: The key.
        field: The field.
        absent: Value of the field in other networks.
        default: The key's default.
    """
    return _row(kinds, (key,), absent, write=lambda network: unless_default(key, getattr(network, field), default))


def mamba2_heads(hidden_size: int, heads: int | None, head_dim: int) -> int:
    """Return the number of heads of a `mamba2` block: by default its channels are twice the hidden size."""
    return heads or 2 * hidden_size // head_dim


def mamba_width(hidden_size: int, width: int | None, of_mlp: int | None, expansion: float | None) -> int:
    """Return the channels of a `mamba` block, by default twice the hidden size. gpt-neox takes the MLP's keys."""
    if width or of_mlp:
        return width or of_mlp or 0
    return int((expansion or 2) * hidden_size)


def _dt_rank(hidden_size: int, given: int | None) -> int:
    return given or -(-hidden_size // 16)


def _state(given: int | None, attention_config: Any, num_layers: int) -> int:
    """Return the elements of the state of a channel; the rules refuse kinds with other defaults in one network."""
    kinds = attention_kinds(attention_config, num_layers)
    return given or next(_STATES[kind] for kind in kinds if kind in _STATES)


def _rwkv_width(hidden_size: int, width: int | None) -> int:
    return width or hidden_size


def rwkv_head_size(hidden_size: int, width: int | None, head_size: int | None, heads: int | None) -> int:
    """Return the channels of a head of an `rwkv` block. A network without attention gives its heads as gpt-neox does.

    Args:
        hidden_size: The key.
        width: `dim_att`.
        head_size: The key.
        heads: `num_attention_heads`.
    """
    if head_size:
        return head_size
    if heads:
        return _rwkv_width(hidden_size, width) // heads
    return _RWKV_HEAD


def _rwkv_heads(hidden_size: int, width: int | None, head_size: int | None, heads: int | None) -> int:
    return _rwkv_width(hidden_size, width) // rwkv_head_size(hidden_size, width, head_size, heads)


def rwkv_mlp_width(hidden_size: int, width: int | None, of_mlp: int | None, expansion: float | None) -> int:
    """Return the width of channel mixing: `ffn_dim`, or what gpt-neox derives from the MLP's keys."""
    if width:
        return width
    return (of_mlp or int((expansion or 3.5) * hidden_size)) // _RWKV_MLP_UNIT * _RWKV_MLP_UNIT


def _delta_epsilon(given: float | None, norm: str, *epsilons: float) -> float:
    return given or read_epsilon(norm, *epsilons) or _DELTA_EPSILON


def _delta_residual(placement: str | None, of_network: str) -> str:
    """Return the residual of `gated_delta` blocks if it is not that of the network, else an empty name."""
    if placement is None or placement == of_network:
        return ""
    return RESIDUAL_OF_PLACEMENT[placement]


def _write_delta_residual(network: Architecture) -> Keys:
    for placement, residual in RESIDUAL_OF_PLACEMENT.items():
        if network.linear_residual == residual:
            return {"linear_norm_placement": placement}
    return {}


_DELTA_SIZES: Final = (
    ("linear_key_heads", "linear_num_key_heads", 16),
    ("linear_value_heads", "linear_num_value_heads", 32),
    ("linear_key_dim", "linear_key_head_dim", 128),
    ("linear_value_dim", "linear_value_head_dim", 128),
    ("linear_conv", "linear_conv_kernel_dim", 4),
)
"""Field, key and default of each size of a `gated_delta` block."""

RECURRENT_FIELDS: Mapping[str, FieldKeys] = MappingProxyType(
    {
        "mamba_heads": _row(
            MAMBA2_KINDS,
            ("hidden_size", "mamba_num_heads", "mamba_head_dim"),
            0,
            mamba2_heads,
            lambda network: {"mamba_num_heads": network.mamba_heads},
        ),
        "mamba_head_dim": _value(MAMBA2_KINDS, "mamba_head_dim", "mamba_head_dim", 0, 64),
        "mamba_groups": _value(MAMBA2_KINDS, "mamba_num_groups", "mamba_groups", 0, 1),
        "mamba_width": _row(
            ("mamba",),
            ("hidden_size", "mamba_width", "intermediate_size", "expansion_factor"),
            0,
            mamba_width,
            lambda network: unless_default("mamba_width", network.mamba_width, 2 * network.hidden_size),
        ),
        "mamba_dt_rank": _row(
            ("mamba",),
            ("hidden_size", "mamba_dt_rank"),
            0,
            _dt_rank,
            lambda network: unless_default("mamba_dt_rank", network.mamba_dt_rank, _dt_rank(network.hidden_size, None)),
        ),
        "mamba_state": _row(
            _MAMBA_KINDS,
            ("mamba_state_dim", *_PATTERN),
            0,
            _state,
            lambda network: {"mamba_state_dim": network.mamba_state},
        ),
        "mamba_conv": _value(_MAMBA_KINDS, "mamba_conv_width", "mamba_conv", 0, 4),
        "mamba_conv_bias": _value(_MAMBA_KINDS, "mamba_use_bias_in_conv", "mamba_conv_bias", False, True),
        "mamba_linear_bias": _value(_MAMBA_KINDS, "mamba_use_bias_in_linears", "mamba_linear_bias", False, False),
        **{field: _value(DELTA_KINDS, key, field, 0, default) for field, key, default in _DELTA_SIZES},
        "linear_negative_eigenvalues": _value(
            DELTA_KINDS, "linear_allow_neg_eigval", "linear_negative_eigenvalues", False, False
        ),
        "linear_norm_epsilon": _row(
            DELTA_KINDS,
            ("linear_norm_epsilon", "norm", *EPSILONS),
            0.0,
            _delta_epsilon,
            lambda network: {"linear_norm_epsilon": network.linear_norm_epsilon},
        ),
        "linear_residual": _row(
            DELTA_KINDS, ("linear_norm_placement", "norm_placement"), "", _delta_residual, _write_delta_residual
        ),
        "rwkv_width": _row(
            RWKV_KINDS,
            ("hidden_size", "dim_att"),
            0,
            _rwkv_width,
            lambda network: unless_default("dim_att", network.rwkv_width, network.hidden_size),
        ),
        "rwkv_heads": _row(
            RWKV_KINDS,
            ("hidden_size", "dim_att", "head_size", "num_attention_heads"),
            0,
            _rwkv_heads,
            lambda network: {"head_size": network.rwkv_width // network.rwkv_heads},
        ),
        "rwkv_mlp_width": _row(
            RWKV_KINDS,
            ("hidden_size", "ffn_dim", "intermediate_size", "expansion_factor"),
            0,
            rwkv_mlp_width,
            lambda network: {"ffn_dim": network.rwkv_mlp_width},
        ),
    }
)
"""Field of `Architecture` -> its keys."""
