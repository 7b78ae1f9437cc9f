"""Accumulation of bf16 gradients as soon as they are there: DeepSpeed's own numbers, with less memory."""

import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

LAYOUTS = {"two data ranks": {"zero": 1}, "two stages": {"pp": 2}, "two stages, ZeRO 1": {"pp": 2, "zero": 1}}


def runs(plans, deepspeeds_own=False):
    """Of each plan: loss and norm of each step, bytes of gradients after its backward passes, final weights."""
    return [_run(plan, deepspeeds_own) for plan in plans]


def _run(plan, deepspeeds_own):
    from neox.engine import initialize_distributed, initialize_engine

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    wrapper = engine.deepspeed_engine.optimizer
    if deepspeeds_own:
        wrapper.__class__ = BF16_Optimizer
    kept = []
    parameters = list(engine.deepspeed_engine.module.parameters())
    engine.optimizer.register_step_pre_hook(
        lambda *_: kept.append(sum(p.grad.numel() * p.grad.element_size() for p in parameters if p.grad is not None))
    )
    data = batches(plan, grid.dp_rank)
    curve = [(r.loss, r.grad_norm) for r in (engine.train_batch(data) for _ in range(4))]
    return curve, kept, [p.detach().float().numpy().copy() for p in parameters]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if "stages," in name else pytest.mark.slow) for name in LAYOUTS]
)
def test_curves_are_deepspeeds(layout):
    keys = {**LAYOUTS[layout], "train_batch_size": 4, "gradient_clipping": 0.5}
    plans = [tiny_plan(2, **keys, bf16={"enabled": True, "immediate_grad_update": on}) for on in (True, False)]
    ours = run_ranks(2, runs, plans)
    deepspeeds = run_ranks(2, runs, plans[1:], True)
    for (immediate, late), (original,) in zip(ours, deepspeeds, strict=True):
        # With ZeRO 0 gradients are accumulated in bf16, and DeepSpeed rounds the clipping factor to it.
        bound = 0 if keys.get("zero") else 2e-3
        for curve, _, weights in (immediate, late):
            torch.testing.assert_close(torch.tensor(curve), torch.tensor(original[0]), rtol=bound, atol=0)
            for mine, theirs in zip(weights, original[2], strict=True) if bound == 0 else ():
                assert (mine == theirs).all()
        assert immediate[0] == late[0]
        assert set(immediate[1]) == {0}
        assert min(late[1]) > 0
        assert any(norm > 0.5 for _, norm in original[0])  # some steps were clipped
