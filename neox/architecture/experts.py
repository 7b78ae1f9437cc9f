"""Mixtures of experts on paper: routers, parameters, and the names of what they report.

Parameters of experts are stacked: E experts, O output features, I input features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal, get_args

from neox.architecture.activations import ACTIVATIONS
from neox.architecture.architecture import Architecture
from neox.architecture.parameter import ZEROS, FromKey, ParameterSpec

RouterName = Literal["sinkhorn", "topk", "sigmoid"]
"""How the experts of a token are chosen, and how their outputs are weighted:

- `sinkhorn`: in training, the k largest of Sinkhorn's balanced assignment; otherwise the k largest scores. Weights are
  the softmax over all experts, or the sigmoid if k is 1 (gpt-neox).
- `topk`: the k largest of the softmax over all experts, which are also the weights. Divided by their sum they equal the
  softmax over the chosen experts (Mixtral).
- `sigmoid`: the k largest sigmoids, with a bias for the choice only (DeepSeek-V3).
"""
ROUTERS: Final[tuple[str, ...]] = get_args(RouterName)

BALANCE_LOSS: Final = "moe_balance_loss"
Z_LOSS: Final = "moe_z_loss"
LARGEST_SHARE: Final = "moe_largest_share"
DROPPED: Final = "moe_dropped"
CHOICES: Final = "moe_choices"
"""Number of the choices of experts, of which the statistics are shares. It is not reported."""


def expert_parameters(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Return the parameters of a router, its experts and a shared expert, which has no biases."""
    hidden = architecture.hidden_size
    number = architecture.num_experts
    parameters = [ParameterSpec("mlp.router.weight", (number, hidden))]
    if architecture.router_logit_bias:
        parameters.append(ParameterSpec("mlp.router.bias", (number,), init=ZEROS))
    if architecture.router_bias:
        bias = ParameterSpec("mlp.router.selection_bias", (number,), init=ZEROS, trained=False, stays_fp32=True)
        parameters.append(bias)
    width = architecture.expert_width
    rows, sections = _first_product(architecture, width)
    first = ParameterSpec(
        "mlp.experts.dense_h_to_4h.weight",
        (number, rows, hidden),
        1,
        sections=sections,
        experts=number,
        active_experts=architecture.experts_per_token,
    )
    last = ParameterSpec(
        "mlp.experts.dense_4h_to_h.weight",
        (number, hidden, width),
        2,
        init=FromKey.OUTPUT_METHOD,
        experts=number,
        active_experts=architecture.experts_per_token,
    )
    parameters.append(first)
    if architecture.expert_bias:
        shape = (number, rows)
        name = "mlp.experts.dense_h_to_4h.bias"
        parameters.append(replace(first, name=name, shape=shape, init=ZEROS, of_norm=True))
    parameters.append(last)
    if architecture.expert_bias:
        shape = (number, hidden)
        name = "mlp.experts.dense_4h_to_h.bias"
        parameters.append(replace(last, name=name, shape=shape, partition_dim=None, init=ZEROS, of_norm=True))
    if architecture.shared_expert_width:
        parameters += _shared_expert(architecture)
    return tuple(parameters)


def _shared_expert(architecture: Architecture) -> list[ParameterSpec]:
    hidden = architecture.hidden_size
    width = architecture.shared_expert_width
    rows, sections = _first_product(architecture, width)
    parameters = [
        ParameterSpec("mlp.shared_expert.dense_h_to_4h.weight", (rows, hidden), 0, sections=sections),
        ParameterSpec("mlp.shared_expert.dense_4h_to_h.weight", (hidden, width), 1, init=FromKey.OUTPUT_METHOD),
    ]
    if architecture.shared_expert_gate:
        parameters.append(ParameterSpec("mlp.shared_expert_gate.weight", (1, hidden)))
    return parameters


def _first_product(architecture: Architecture, width: int) -> tuple[int, tuple[int, ...]]:
    """Return the rows of an MLP's first product, and its sections: two halves if the activation has a gate."""
    factor = ACTIVATIONS[architecture.activation].width_factor
    if factor == 1:
        return width, ()
    return width * factor, (width,) * factor


def expert_losses(architecture: Architecture) -> tuple[str, ...]:
    """Return the names of the losses with a coefficient."""
    names = []
    if architecture.balance_coefficient:
        names.append(BALANCE_LOSS)
    if architecture.z_coefficient:
        names.append(Z_LOSS)
    return tuple(names)


def expert_statistics(architecture: Architecture) -> tuple[str, ...]:
    """Return the names of the numbers about how tokens are divided over experts."""
    if architecture.expert_capacity:
        return (LARGEST_SHARE, DROPPED)
    return (LARGEST_SHARE,)
