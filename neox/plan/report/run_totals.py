"""Tokens, compute and time of a run, and the balance of its stages."""

from __future__ import annotations

from dataclasses import dataclass

from neox.architecture import training_flops_per_token
from neox.devices import GPUS
from neox.plan.devices.device import Device, gpu_device
from neox.plan.memory import MemoryPlan, fullest_stage
from neox.plan.run_plan import RunPlan
from neox.plan.time.simulation import simulated_length
from neox.plan.time.step import StepTime, estimate_step, unsupported_time

_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class RunTotals:
    """Tokens, compute and time of a run.

    Attributes:
        tokens_per_step: Tokens of one optimizer step, after ramp-up and curriculum.
        tokens: Tokens of the whole run; None without train_iters.
        flops_per_token: Operations of forward and backward, without recomputation.
        bubble: Fraction of a step in which a pipeline stage is idle, by simulation.
        peak_tflops: Peak of one rank's device; None if it is not known.
        mfu: Model FLOPs utilisation, estimated or assumed.
        days: Time of the whole run; None without train_iters, and if the peak is not known.
        estimate: Estimated time of a step; None if `mfu` is that of `expected_mfu`.
    """

    tokens_per_step: int
    tokens: int | None
    flops_per_token: int
    bubble: float
    peak_tflops: float | None
    mfu: float
    days: float | None
    estimate: StepTime | None = None


def run_totals(plan: RunPlan, device: Device | None = None) -> RunTotals:
    """Return the tokens, compute and time of a plan on a device, by default on a GPU of `gpu_memory_gib`."""
    config = plan.config
    seq_length = config.model.seq_length or 0
    device = device or gpu_device(plan)
    peak = device.peak_tflops
    mfu = config.logging.expected_mfu
    estimate = _estimate(plan, device)
    if estimate is not None and peak is not None:
        step_operations = plan.batch.train_batch_size * seq_length * _flops_per_token(plan, seq_length)
        mfu = step_operations / estimate.seconds / (plan.grid.world_size * peak * 1e12)
    tokens, operations = _totals(plan)
    days = None
    if operations is not None and peak is not None:
        operations_per_second = plan.grid.world_size * peak * 1e12 * mfu
        days = operations / operations_per_second / _SECONDS_PER_DAY
    return RunTotals(
        tokens_per_step=plan.batch.train_batch_size * seq_length,
        tokens=tokens,
        flops_per_token=_flops_per_token(plan, seq_length),
        bubble=_bubble(plan),
        peak_tflops=peak,
        mfu=mfu,
        days=days,
        estimate=estimate,
    )


def _estimate(plan: RunPlan, device: Device) -> StepTime | None:
    """Return the estimated time of a step.

    None if the kind of GPU is not known, another speed is given, or times are not modelled: other networks, fp32,
    offload to files.
    """
    config = plan.config
    kind = config.runner.gpu_type
    if kind is None or device.shared or config.given("expected_mfu") or config.given("peak_theoretical_tflops"):
        return None
    zero = config.deepspeed.zero_optimization
    in_files = zero.states_directory is not None or zero.weights_directory is not None
    run = plan.workload_on(device.family)
    if in_files or unsupported_time(run):
        return None
    return estimate_step(run, GPUS[kind])


def _bubble(plan: RunPlan) -> float:
    """Return the fraction of a step in which a stage is idle if all layers take as long, and backward twice forward."""
    stages = plan.grid.pp_size
    ranges = len(plan.stages[0].ranges)
    forward = [[1.0] * ranges] * stages
    backward = [[2.0] * ranges] * stages
    micro_batches = plan.batch.gradient_accumulation_steps
    name = plan.config.parallelism.pipeline_schedule
    length = simulated_length(name, forward, backward, micro_batches, 0.0)
    return 1 - 3.0 * ranges * micro_batches / length


def _totals(plan: RunPlan) -> tuple[int | None, int | None]:
    """Return the tokens and the operations of the whole run; None without train_iters."""
    iterations = plan.config.training.train_iters
    if iterations is None:
        return None, None
    tokens = 0
    operations = 0
    for segment in plan.batch_schedule.segments(iterations):
        tokens += segment.tokens
        operations += segment.tokens * _flops_per_token(plan, segment.seq_length)
    return tokens, operations


def _flops_per_token(plan: RunPlan, seq_length: int) -> int:
    return training_flops_per_token(plan.layers, seq_length, predicted=plan.config.model.predicted_tokens)


def memory_with(plan: RunPlan, *, recompute: bool, device: Device | None = None) -> MemoryPlan:
    """Return the fullest rank's memory with or without recomputation of activations, all else equal."""
    run = plan.workload
    if device is not None:
        run = plan.workload_on(device.family)
    return fullest_stage(run.with_layout(recomputes=recompute), plan.stages)


def imbalance(plan: RunPlan) -> float:
    """Return the largest stage's parameters over the mean stage's."""
    counts = [stage.parameters for stage in plan.stages]
    return max(counts) * len(counts) / sum(counts)


def stage_ranks(plan: RunPlan, stage: int) -> tuple[int, int]:
    """Return the first and last rank of a stage; its tensor groups are consecutive runs of tp ranks."""
    size = plan.grid.dp_size * plan.grid.tp_size
    return stage * size, (stage + 1) * size - 1
