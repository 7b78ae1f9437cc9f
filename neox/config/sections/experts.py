"""Mixtures of experts: which blocks have them, and how a router chooses the experts of a token."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from neox.architecture import RouterName
from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith, Requires
from neox.config.sections.numbers import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

_ZeroOrOne = Annotated[int, Field(ge=0, le=1)]
_EXPERTS = OnlyWith("moe_num_experts", above=1)
_CHOOSES_BY_SCORE = Requires("moe_router_type", ("topk", "sigmoid"), advice="use moe_router_type topk or sigmoid")
_SIGMOID = Requires("moe_router_type", ("sigmoid",), advice="use moe_router_type sigmoid")


def _without(key: str, values: tuple[Any, ...] = (), reason: str = "") -> Excludes:
    return Excludes(key, values, reason=reason)


class ExpertsConfig(Section):
    """Mixtures of experts."""

    moe_num_experts: Annotated[
        PositiveInt,
        Excludes(
            "fp8", ("tensorwise",), reason="the grouped product in fp8 has a scale for each row", advice="use rowwise"
        ),
        _without("use_mup"),
        _without("objective", ("masked_lm",), "padding would be routed, too"),
    ] = 1
    """Number of experts in the blocks that moe_layer_freq or moe_expert_interval name; 1 for no experts. Each token is
    computed by moe_top_k of them. By default experts have no biases (gpt-neox). Megatron-LM's name: num_experts."""

    moe_top_k: Annotated[PositiveInt, _EXPERTS] = 1
    """Number of experts that compute a token. Megatron-LM's name: moe_router_topk."""

    moe_expert_interval: Annotated[PositiveInt, _EXPERTS] = 1
    """Blocks 0, n, 2n, ... have experts, the others one MLP."""

    moe_layer_freq: Annotated[
        PositiveInt | tuple[Annotated[int, Field(ge=0, le=1)], ...] | None,
        _EXPERTS,
        Excludes("moe_expert_interval", above=1),
    ] = None
    """Blocks with experts in Megatron-LM's words: a number as moe_expert_interval, or a list with 1 for each block with
    experts and 0 for each other one."""

    moe_first_k_dense: Annotated[NonNegativeInt, _EXPERTS] = 0
    """Number of first blocks that have no experts, whatever the two keys above say."""

    moe_ffn_hidden_size: Annotated[PositiveInt | None, _EXPERTS] = None
    """Inner width of one expert, by default that of the MLP."""

    moe_expert_bias: Annotated[bool, _EXPERTS] = False
    """Add biases to both linear layers of the routed experts (gpt-oss)."""

    moe_shared_expert_intermediate_size: Annotated[PositiveInt | None, _EXPERTS] = None
    """Inner width of an expert that computes every token, next to those that it chooses; none by default."""

    moe_shared_expert_gate: Annotated[bool, _EXPERTS, Requires("moe_shared_expert_intermediate_size")] = False
    """Multiply the output of the shared expert by the sigmoid of a number for each token (Qwen2-MoE)."""

    moe_router_type: Annotated[RouterName, _EXPERTS] = "sinkhorn"
    """How experts are chosen. `sinkhorn`: in training by Sinkhorn's balanced assignment, otherwise by the largest
    scores (gpt-neox). `topk`: by the softmax over all experts. `sigmoid`: by the sigmoid of each expert's score
    (DeepSeek-V3). The router computes in fp32 in every precision."""

    moe_router_logit_bias: Annotated[bool, _EXPERTS] = False
    """Add a trained bias per expert to the router's logits (gpt-oss)."""

    moe_norm_topk_prob: Annotated[bool, _EXPERTS, _CHOOSES_BY_SCORE] = False
    """Divide the weights of a token's experts by their sum. With `topk` they are then the softmax over the chosen
    experts (Mixtral)."""

    moe_router_topk_scaling_factor: Annotated[PositiveFloat, _EXPERTS] = 1.0
    """Factor of the weights of a token's experts."""

    moe_router_num_groups: Annotated[
        PositiveInt | None, _EXPERTS, _CHOOSES_BY_SCORE, Requires("moe_router_group_topk", advice="give both")
    ] = None
    """Number of groups of neighbouring experts. A token chooses moe_router_group_topk groups first, and its experts
    among theirs."""

    moe_router_group_topk: Annotated[
        PositiveInt | None, _EXPERTS, Requires("moe_router_num_groups", advice="give both")
    ] = None
    """Number of groups that a token chooses: those with the largest sums of best expert scores."""

    moe_router_group_score_topk: Annotated[PositiveInt | None, _EXPERTS, Requires("moe_router_num_groups")] = None
    """Number of best expert scores in a group that are added up to the group's score: 2 in DeepSeek-V3. By default
    moe_top_k / moe_router_group_topk, as in Megatron-LM, and at least 1."""

    moe_router_enable_expert_bias: Annotated[
        bool,
        _EXPERTS,
        _SIGMOID,
        Excludes("zero_optimization.stage", (3,), reason="it divides biases, which change without a gradient"),
    ] = False
    """Add a bias to each expert's score for the choice. After each step it moves towards equal shares, without a
    gradient (arXiv:2408.15664)."""

    moe_router_bias_update_rate: Annotated[NonNegativeFloat, OnlyWith("moe_router_enable_expert_bias")] = 0.001
    """Distance that each bias moves in a step."""

    moe_jitter_eps: Annotated[
        PositiveFloat | None,
        _EXPERTS,
        _CHOOSES_BY_SCORE,
        Excludes("sequence_parallel", reason="tensor ranks would draw different numbers"),
    ] = None
    """In training the router's inputs are multiplied by random numbers from 1 - moe_jitter_eps to 1 + moe_jitter_eps.
    Megatron-LM's name: moe_input_jitter_eps."""

    moe_expert_capacity_factor: Annotated[PositiveFloat | None, _EXPERTS] = None
    """Most tokens of one expert in a micro batch, as a multiple of equal shares. Later tokens skip that expert, and
    `moe_dropped` is their share. By default no token is dropped."""

    moe_aux_loss_coeff: Annotated[NonNegativeFloat, _EXPERTS, _CHOOSES_BY_SCORE] = 0.0
    """Factor of the loss that balances experts: number of experts x sum over experts of the fraction of choices x the
    mean score. It is 1 for each block if all experts are equal, and blocks are summed. (Megatron-LM's definition; that
    of transformers is moe_top_k times as large, and one for all blocks.)"""

    moe_router_load_balancing_type: Annotated[
        Literal["aux_loss", "seq_aux_loss"], OnlyWith("moe_aux_loss_coeff", above=0)
    ] = "aux_loss"
    """What that loss is computed over: all tokens of a micro batch, or each sample (`seq_aux_loss`), so that it does
    not depend on how samples are divided into micro batches."""

    moe_z_loss_coeff: Annotated[NonNegativeFloat, _EXPERTS] = 0.0
    """Factor of the router's z-loss, the mean square of the logarithm of the sum of exp(logits) (arXiv:2202.08906)."""
