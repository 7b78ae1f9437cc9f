"""Figures of a run that follow from its plan: tokens, operations, the pipeline's bubble, days."""

from __future__ import annotations

from dataclasses import dataclass

from neox.architecture import training_flops_per_token
from neox.config.plan import RunPlan

# Dense bf16 peak of one H100 SXM, assumed where peak_theoretical_tflops is not given.
ASSUMED_PEAK_TFLOPS = 989.0


@dataclass(frozen=True)
class Figures:
    """tokens are per optimizer step and whole run; flops_per_token counts forward and backward, without recompute.

    bubble: part of a step that a pipeline stage idles. days is None without train_iters.
    """

    tokens_per_step: int
    tokens: int | None
    flops_per_token: int
    bubble: float
    peak_tflops: float
    mfu: float
    days: float | None


def figures(plan: RunPlan) -> Figures:
    """Return a plan's figures."""
    steps, pp = plan.batch.gradient_accumulation_steps, plan.grid.pp_size
    per_step = plan.batch.train_batch_size * (plan.config.model.seq_length or 0)
    iterations = plan.config.training.train_iters
    tokens = None if iterations is None else per_step * iterations
    peak = plan.config.logging.peak_theoretical_tflops or ASSUMED_PEAK_TFLOPS
    mfu = plan.config.logging.expected_mfu
    operations = training_flops_per_token(plan.layers, plan.config.model.seq_length or 0)
    days = None if tokens is None else tokens * operations / (plan.grid.world_size * peak * 1e12 * mfu) / 86_400
    return Figures(per_step, tokens, operations, (pp - 1) / (steps + pp - 1), peak, mfu, days)
