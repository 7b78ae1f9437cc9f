"""Training in fp8 under every layout: each follows bf16's losses, and what changes no product changes no loss."""

from __future__ import annotations

import pytest

from neox.ops import FP8_RECIPES
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import tiny_plan, train_curves

pytestmark = pytest.mark.slow
STEPS = 4
BF16 = {"precision": "bf16", "zero": 1}


def losses(curves: list[list[tuple[float, float]]]) -> list[list[float]]:
    return [[loss for loss, _ in curve] for curve in curves]


def test_recomputation_and_zero_repeat_the_losses():
    keys = [{}, {"checkpoint_activations": True}, {"zero": 2}, {"zero": 3}]
    plans = [tiny_plan(1, **{**BF16, "fp8": "tensorwise", **more}) for more in keys]
    plain, *others = losses(run_ranks(1, train_curves, plans, STEPS, timeout=400)[0])
    assert others[0] == plain
    for other in others[1:]:
        assert other == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize(
    "keys",
    [
        {"mp": 2},
        {"mp": 2, "checkpoint_activations": True, "gpt_j_residual": True},
        {"pp": 2},
        {"lora": {"r": 2, "target": ["query_key_value", "dense"]}},
        {"mtp_num_layers": 2, "mp": 2},
        {"mtp_num_layers": 2, "pp": 2, "checkpoint_activations": True},
    ],
    ids=["tensor", "tensor-recomputed", "stages", "lora", "multi-token", "multi-token stages"],
)
def test_losses_follow_bf16(keys: dict[str, object]):
    plans = [tiny_plan(2, **BF16, **keys, **more) for more in ({}, *({"fp8": name} for name in FP8_RECIPES))]
    plain, *others = losses(run_ranks(2, train_curves, plans, STEPS, timeout=400)[0])
    for other in others:
        assert other != plain
        assert other == pytest.approx(plain, rel=2e-2)


EXPERTS = {
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_router_type": "topk",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_expert_interval": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "activation": "swiglu",
    "mlp_width": 64,
}
DIVIDED = {"expert_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("world", "layouts"),
    [(1, [{}]), (2, [{"mp": 2}, DIVIDED, {**DIVIDED, "zero": 3}, {"pp": 2, "checkpoint_activations": True}])],
    ids=["one rank", "two ranks"],
)
def test_experts_follow_bf16(world: int, layouts: list[dict[str, object]]):
    plans = []
    for layout in layouts:
        for keys in ({}, {"fp8": "rowwise"}):
            plans.append(tiny_plan(world, **{**BF16, **EXPERTS, **layout, **keys}))
    curves = losses(run_ranks(world, train_curves, plans, 20, timeout=600)[0])
    for plain, rounded in zip(curves[::2], curves[1::2], strict=True):
        assert plain[-1] < 0.8 * plain[0]
        assert rounded != plain
        assert rounded == pytest.approx(plain, rel=2e-2)
