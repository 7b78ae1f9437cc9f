"""Table of the YAML keys that the fields of a mixture of experts are read from, and written as."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from neox.architecture import Architecture
from neox.plan.network.field_keys import FieldKeys, Keys, read_if, unless_default
from neox.plan.network.mlp_width import MLP_SIZES, mlp_width

_NUMBER: Final = "moe_num_experts"


def _has_experts(number: int) -> bool:
    return number > 1


def expert_blocks(
    num_layers: int, interval: int, layer_freq: int | Sequence[int] | None, first_dense: int
) -> tuple[int, ...]:
    """Return the numbers of the blocks that have experts.

    Args:
        num_layers: Number of blocks.
        interval: Value of `moe_expert_interval`.
        layer_freq: Value of `moe_layer_freq`.
        first_dense: Value of `moe_first_k_dense`.
    """
    if isinstance(layer_freq, int):
        interval = layer_freq
    blocks = []
    for number in range(first_dense, num_layers):
        if layer_freq is None or isinstance(layer_freq, int):
            has_experts = number % interval == 0
        else:
            has_experts = number < len(layer_freq) and bool(layer_freq[number])
        if has_experts:
            blocks.append(number)
    return tuple(blocks)


def _expert_width(given: int | None, *sizes: Any) -> int:
    return given or mlp_width(*sizes)


def group_best(groups: int | None, top_groups: int | None, given: int | None, top_k: int, experts: int) -> int:
    """Return how many best expert scores are added up to a group's score; 0 without groups.

    Args:
        groups: Value of `moe_router_num_groups`.
        top_groups: Value of `moe_router_group_topk`.
        given: Value of `moe_router_group_score_topk`.
        top_k: Value of `moe_top_k`.
        experts: Value of `moe_num_experts`.
    """
    if groups is None or top_groups is None:
        return 0
    best = given or max(1, top_k // top_groups)
    return min(best, experts // groups)


def _write_group_best(network: Architecture) -> Keys:
    if not network.router_groups:
        return {}
    return {"moe_router_group_score_topk": network.router_group_best}


def _row(
    keys: tuple[str, ...], absent: Any, read: Callable[..., Any], write: Callable[[Architecture], Keys]
) -> FieldKeys:
    """Return the row of a field that dense networks do not have.

    Args:
        keys: Keys that the field follows from.
        absent: Value of the field in a dense network.
        read: Values of `keys` -> the field's value in a network with experts.
        write: Network with experts -> the keys that this field adds.
    """

    def write_if_present(network: Architecture) -> Keys:
        if not network.num_experts:
            return {}
        return write(network)

    every = (_NUMBER, *keys)
    return FieldKeys(every, read_if(_has_experts, absent, read), write_if_present, later=every)


def _value(key: str, field: str, default: Any, absent: Any) -> FieldKeys:
    """Return the row of a field that is the value of one key, and the same as in a dense network without the key.

    Args:
        key: The key.
        field: The field.
        default: Value of the field that is not written, because it follows from the key's default.
        absent: Value of the field in a dense network.
    """

    def write(network: Architecture) -> Keys:
        return unless_default(key, getattr(network, field), default)

    def read(value: Any) -> Any:
        return absent if value is None else value

    return _row((key,), absent, read, write)


def _write_blocks(network: Architecture) -> Keys:
    if network.expert_blocks == tuple(range(network.num_layers)):
        return {}
    has_experts = [int(number in network.expert_blocks) for number in range(network.num_layers)]
    return {"moe_layer_freq": has_experts}


def _write_balance(network: Architecture) -> Keys:
    if not network.balance_per_sample:
        return {}
    return {"moe_router_load_balancing_type": "seq_aux_loss"}


EXPERT_FIELDS: Mapping[str, FieldKeys] = MappingProxyType(
    {
        "num_experts": FieldKeys(
            (_NUMBER,),
            lambda number: number if _has_experts(number) else 0,
            lambda network: unless_default(_NUMBER, network.num_experts, 0),
            later=(_NUMBER,),
        ),
        "expert_blocks": _row(
            ("num_layers", "moe_expert_interval", "moe_layer_freq", "moe_first_k_dense"),
            (),
            expert_blocks,
            _write_blocks,
        ),
        "experts_per_token": _value("moe_top_k", "experts_per_token", 1, 0),
        "expert_width": _row(
            ("moe_ffn_hidden_size", "hidden_size", "activation", *MLP_SIZES),
            0,
            _expert_width,
            lambda network: {"moe_ffn_hidden_size": network.expert_width},
        ),
        "expert_bias": _value("moe_expert_bias", "expert_bias", False, False),
        "shared_expert_width": _value("moe_shared_expert_intermediate_size", "shared_expert_width", 0, 0),
        "shared_expert_gate": _value("moe_shared_expert_gate", "shared_expert_gate", False, False),
        "router": _value("moe_router_type", "router", "sinkhorn", ""),
        "router_logit_bias": _value("moe_router_logit_bias", "router_logit_bias", False, False),
        "router_normalizes": _value("moe_norm_topk_prob", "router_normalizes", False, False),
        "router_groups": _value("moe_router_num_groups", "router_groups", 0, 0),
        "router_top_groups": _value("moe_router_group_topk", "router_top_groups", 0, 0),
        "router_group_best": _row(
            (
                "moe_router_num_groups",
                "moe_router_group_topk",
                "moe_router_group_score_topk",
                "moe_top_k",
                "moe_num_experts",
            ),
            0,
            group_best,
            _write_group_best,
        ),
        "router_scale": _value("moe_router_topk_scaling_factor", "router_scale", 1.0, 1.0),
        "router_bias": _value("moe_router_enable_expert_bias", "router_bias", False, False),
        "router_bias_rate": _row(
            ("moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
            0.0,
            lambda has_bias, rate: rate if has_bias else 0.0,
            lambda network: unless_default("moe_router_bias_update_rate", network.router_bias_rate, 0.0),
        ),
        "router_jitter": _value("moe_jitter_eps", "router_jitter", 0.0, 0.0),
        "expert_capacity": _value("moe_expert_capacity_factor", "expert_capacity", 0.0, 0.0),
        "balance_coefficient": _value("moe_aux_loss_coeff", "balance_coefficient", 0.0, 0.0),
        "balance_per_sample": _row(
            ("moe_router_load_balancing_type",),
            False,
            lambda kind: kind == "seq_aux_loss",
            _write_balance,
        ),
        "z_coefficient": _value("moe_z_loss_coeff", "z_coefficient", 0.0, 0.0),
    }
)
"""Field of `Architecture` -> its keys."""
