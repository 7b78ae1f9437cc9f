"""Mixtures of experts train to the same losses, gradients and weights under every layout of ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

STEPS = 4
EXPERTS: dict[str, Any] = {
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_expert_interval": 2,
    "moe_router_type": "topk",
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
    "moe_aux_loss_coeff": 0.1,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_z_loss_coeff": 0.01,
    "no_weight_tying": True,
}
BIASED: dict[str, Any] = {
    **EXPERTS,
    "moe_router_type": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
}
RECOMPUTED = {"checkpoint_activations": True, "checkpoint_num_layers": 2}
ONLY_EXPERTS_LOSSES = {"loss_normalization": "micro_batch"}
"""Key with which batches without labels have no loss of the objective."""

LAYOUTS: list[dict[str, Any]] = [
    {"mp": 2},
    {"mp": 2, "sequence_parallel": True, **RECOMPUTED},
    {"pp": 2},
    {"pp": 2, "zero": 1, **RECOMPUTED},
    {"zero": 0},
    {"zero": 1, "train_micro_batch_size_per_gpu": 2},
    {"zero": 2},
    {"zero": 3},
]


def curves(plans: list[RunPlan]) -> list[list[dict[str, float]]]:
    """Train each plan on this rank; return scores and gradient norm of each step, then of an evaluation."""
    from neox.engine import initialize_distributed, initialize_engine

    results = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = _batches(plan, grid.dp_rank)
        steps = [engine.train_batch(data) for _ in range(STEPS)]
        evaluated = engine.eval_batch(_batches(plan, grid.dp_rank)).scores
        results.append([{**step.scores, "norm": step.grad_norm} for step in steps] + [dict(evaluated)])
    return results


def _batches(plan: RunPlan, dp_rank: int) -> Iterator[dict[str, torch.Tensor]]:
    has_labels = plan.loss_normalization != "micro_batch"
    for batch in batches(plan, dp_rank):
        yield {**batch, "loss_mask": batch["loss_mask"] * float(has_labels)}


@functools.cache
def reference(kind: str) -> list[dict[str, float]]:
    """The curve of one rank: with experts, with biases of the choice, or with the losses of experts only."""
    ((found,),) = run_ranks(1, curves, [tiny_plan(1, **KINDS[kind])])
    return found


KINDS: dict[str, dict[str, Any]] = {
    "experts": EXPERTS,
    "biased": BIASED,
    "losses of experts": {**EXPERTS, **ONLY_EXPERTS_LOSSES, "gradient_clipping": 0.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_trains_the_same(kind: str):
    layouts = [layout for layout in LAYOUTS if kind != "biased" or layout.get("zero") != 3]
    first = reference(kind)[0]
    names = ["total_loss", "lm_loss", "moe_balance_loss", "moe_z_loss", "moe_largest_share", "norm"]
    assert list(first) == names
    assert first["total_loss"] == pytest.approx(sum(first[name] for name in names[1:4]))
    assert first["norm"] > 0
    for found in run_ranks(2, curves, [tiny_plan(2, **KINDS[kind], **layout) for layout in layouts]):
        for layout, curve in zip(layouts, found, strict=True):
            for step, (ours, theirs) in enumerate(zip(curve, reference(kind), strict=True)):
                if layout.get("train_micro_batch_size_per_gpu"):  # a share of one micro batch depends on its size
                    ours["moe_largest_share"] = theirs["moe_largest_share"]
                assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-8), (layout, step)


def test_recomputation_routes_and_counts_once():
    plans = [tiny_plan(1, **BIASED), tiny_plan(1, **BIASED, **RECOMPUTED)]
    ((kept, recomputed),) = run_ranks(1, curves, plans)
    assert recomputed == kept
