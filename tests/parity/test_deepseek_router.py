"""DeepSeek-V3's router and mixture: choices, weights, outputs and gradients equal those of transformers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from neox.model import BlockContext, ExpertMLP
from neox.parallel import ParallelGrid
from tests.plans import small_plan
from tests.transformers_versions import of_the_locked_version


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the numbers of a mixture, by the names of transformers."""
    groups = draw(st.integers(1, 4))
    size = draw(st.integers(2, 6))
    chosen = draw(st.integers(1, groups))
    return {
        "n_group": groups,
        "topk_group": chosen,
        "n_routed_experts": groups * size,
        "num_experts_per_tok": draw(st.integers(1, chosen * size)),
        "n_shared_experts": draw(st.integers(1, 2)),
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "hidden_size": 8 * draw(st.integers(1, 3)),
        "moe_intermediate_size": draw(st.integers(1, 20)),
    }


def ours_of(shape: dict[str, Any]) -> ExpertMLP:
    """Build our mixture by keys of the YAML."""
    network = small_plan(
        hidden_size=shape["hidden_size"],
        num_attention_heads=2,
        activation="swiglu",
        moe_num_experts=shape["n_routed_experts"],
        moe_top_k=shape["num_experts_per_tok"],
        moe_ffn_hidden_size=shape["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=shape["moe_intermediate_size"] * shape["n_shared_experts"],
        moe_router_type="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_norm_topk_prob=shape["norm_topk_prob"],
        moe_router_topk_scaling_factor=shape["routed_scaling_factor"],
        moe_router_num_groups=shape["n_group"],
        moe_router_group_topk=shape["topk_group"],
        moe_router_group_score_topk=2,
    ).architecture
    return ExpertMLP(network, 0, ParallelGrid.single())


def pairs_of(ours: ExpertMLP, theirs: DeepseekV3MoE) -> list[tuple[Tensor, Tensor]]:
    """Return each tensor of ours with theirs, in our order of rows (they have the gate first)."""
    shared = theirs.shared_experts
    gated = theirs.experts.gate_up_proj
    assert ours.shared_expert is not None
    assert ours.router.selection_bias is not None
    return [
        (ours.router.weight, theirs.gate.weight),
        (ours.router.selection_bias, theirs.gate.e_score_correction_bias),
        (ours.experts.dense_h_to_4h.weight, gated.roll(gated.shape[1] // 2, 1)),
        (ours.experts.dense_4h_to_h.weight, theirs.experts.down_proj),
        (ours.shared_expert.dense_h_to_4h.weight, torch.cat([shared.up_proj.weight, shared.gate_proj.weight])),
        (ours.shared_expert.dense_4h_to_h.weight, shared.down_proj.weight),
    ]


def theirs_of(shape: dict[str, Any], seed: int) -> DeepseekV3MoE:
    config = DeepseekV3Config(**shape)
    config._experts_implementation = "eager"
    module = DeepseekV3MoE(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), module.gate.e_score_correction_bias]:
            tensor.normal_(0.0, 0.3, generator=generator)
    return module


@of_the_locked_version
@settings(max_examples=60)
@given(shapes(), st.integers(0, 99))
def test_choices_weights_outputs_and_gradients_equal_those_of_transformers(shape: dict[str, Any], seed: int):
    theirs = theirs_of(shape, seed)
    ours = ours_of(shape)
    with torch.no_grad():
        for own, other in pairs_of(ours, theirs):
            own.copy_(other)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(2, 5, shape["hidden_size"], generator=generator, requires_grad=True)
    target = torch.randn(x.shape, generator=generator)
    routes = ours.router(x, None)[1]
    _, weights, experts = theirs.gate(x)
    compare_choices(routes.experts.flatten(0, 1), routes.weights.flatten(0, 1), experts, weights)
    found = ours(x, BlockContext(torch.arange(5)))[0]
    expected = theirs(x)
    assert (found - expected).norm() <= 1e-6 * expected.norm()
    (found * target).sum().backward()
    of_ours = x.grad
    x.grad = None
    (expected * target).sum().backward()
    assert (of_ours - x.grad).norm() <= 1e-6 * x.grad.norm()
    swap_for_gradients(theirs)
    pairs = [(own.grad, other) for own, other in pairs_of(ours, theirs) if own.requires_grad]
    size = torch.cat([other.flatten() for _, other in pairs]).norm()
    for own, other in pairs:  # the gradient of a single normalised weight is 0 up to rounding
        assert (own - other).norm() <= 1e-6 * size


def swap_for_gradients(module: nn.Module) -> None:
    """Put the gradient of each parameter in its place."""
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def compare_choices(found: Tensor, weights: Tensor, expected: Tensor, expected_weights: Tensor) -> None:
    """Compare experts of tokens and their weights [T, K], whatever the order of a token's experts."""
    order = found.argsort(-1)
    expected_order = expected.argsort(-1)
    assert torch.equal(found.gather(-1, order), expected.gather(-1, expected_order))
    torch.testing.assert_close(
        weights.gather(-1, order), expected_weights.gather(-1, expected_order), rtol=1e-6, atol=1e-7
    )
