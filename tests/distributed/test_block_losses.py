"""Losses that blocks add to the objective's: the same gradients and scores under every layout."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

STEPS = 3
COEFFICIENT = 1000.0


def curves(plans: list[RunPlan], *, with_losses: bool = True) -> list[list[dict[str, float]]]:
    """Train each plan on this rank, with MLPs that want small outputs; return scores and gradient norm of each step."""
    from neox.architecture import choices
    from neox.engine import initialize_distributed, initialize_engine
    from neox.model import BlockContext, block, mlp

    class Small(mlp.MLP):
        """Adds the mean square of its output."""

        def forward(self, x: torch.Tensor, context: BlockContext) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            output, _ = super().forward(x, context)
            return output, {"output_size": COEFFICIENT * output.float().square().mean()}

    if with_losses:
        on_paper = replace(choices.MLPS["dense"], losses=lambda network: ("output_size",))
        choices.MLPS = MappingProxyType({"dense": on_paper})
        block.MLPS = MappingProxyType({"dense": Small})
    results = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank)
        steps = [engine.train_batch(data) for _ in range(STEPS)]
        evaluated = engine.eval_batch(batches(plan, grid.dp_rank)).scores
        results.append([{**step.scores, "norm": step.grad_norm} for step in steps] + [dict(evaluated)])
    return results


def curves_without_losses(plans: list[RunPlan]) -> list[list[dict[str, float]]]:
    return curves(plans, with_losses=False)


PLAIN = {"no_weight_tying": True, "gradient_clipping": 0.0}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
LAYOUTS = [{"pp": 2}, {"pp": 2, "zero": 1, "checkpoint_activations": True}, {"mp": 2}, {"zero": 3}]


@functools.cache
def reference() -> list[dict[str, float]]:
    """The curve of one rank, recomputed or not."""
    plans = [tiny_plan(1, **PLAIN), tiny_plan(1, **PLAIN, checkpoint_activations=True)]
    ((kept, recomputed),) = run_ranks(1, curves, plans)
    assert recomputed == kept
    return kept


def test_every_layout_trains_the_losses_of_all_blocks():
    first = reference()[0]
    assert list(first) == ["total_loss", "lm_loss", "output_size", "norm"]
    assert first["total_loss"] == pytest.approx(first["lm_loss"] + first["output_size"])
    ((without,),) = run_ranks(1, curves_without_losses, [tiny_plan(1, **PLAIN)])
    assert without[0]["norm"] != pytest.approx(first["norm"], rel=1e-2), "the losses change nothing"
    for found in run_ranks(2, curves, [tiny_plan(2, **PLAIN, **layout) for layout in LAYOUTS]):
        for layout, curve in zip(LAYOUTS, found, strict=True):
            assert_close(curve, reference(), 2e-5, layout)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_loss_scale_scales_the_losses_of_earlier_stages(zero: int):
    for (found,) in run_ranks(2, curves, [tiny_plan(2, pp=2, zero=zero, **PLAIN, **FP16)]):
        assert_close(found, reference(), 1e-2, zero)


def assert_close(found, expected, tolerance, layout) -> None:
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=tolerance), (layout, step)
