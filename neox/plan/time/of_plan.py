"""Time of a step of a plan, its picture, and the GPU that it is estimated for."""

from __future__ import annotations

from typing import NamedTuple

from neox.plan.run_plan import RunPlan
from neox.plan.time.gpus import GPUS, Gpu
from neox.plan.time.simulation import Timeline, simulate
from neox.plan.time.step import StepTime, estimate_step, pass_seconds
from neox.plan.time.system import OURS, ranges_of_stage, why_no_estimate

_SHOWN_FOR_EACH_STAGE = 4
"""Micro batches for each stage that a picture has at most."""
_SAME_MEMORY = 0.05
"""Largest relative difference of two GPUs' memory that counts as the same."""


def estimate_of_plan(plan: RunPlan, gpu: Gpu) -> StepTime | None:
    """Return the estimated time of a step; None if it is not estimated: other networks, fp32, offload to files."""
    zero = plan.config.deepspeed.zero_optimization
    in_files = zero.states_directory is not None or zero.weights_directory is not None
    if in_files or why_no_estimate(plan.workload):
        return None
    return estimate_step(plan.workload, gpu)


class StepPicture(NamedTuple):
    """What each pipeline stage does in a step.

    Attributes:
        timeline: Passes of each stage.
        micro_batches: Number of micro batches that the timeline has; the step may have more.
        gradients: Time of reducing gradients after the last pass.
        unit: Unit of all times.
    """

    timeline: Timeline
    micro_batches: int
    gradients: float
    unit: str


def step_picture(plan: RunPlan) -> StepPicture:
    """Return what each pipeline stage does in a step, by simulation.

    Times are estimated if `gpu_type` and the network allow it. Otherwise a forward pass through a stage takes 1, and a
    backward pass 2.
    """
    run = plan.workload
    layout = run.layout
    shown = min(layout.accumulation_steps, _SHOWN_FOR_EACH_STAGE * layout.pp_size)
    kind = plan.config.runner.gpu_type
    if kind is None or why_no_estimate(run):
        ranges = ranges_of_stage(run)
        forward = [[1 / ranges] * ranges] * layout.pp_size
        backward = [[2 / ranges] * ranges] * layout.pp_size
        timeline = simulate(layout.pipeline_schedule, forward, backward, shown)
        return StepPicture(timeline, shown, 0.0, "forward passes of a stage")
    passes = pass_seconds(run, GPUS[kind], OURS)
    timeline = simulate(layout.pipeline_schedule, passes.forward, passes.backward, shown, passes.handoff)
    gradients = estimate_step(run, GPUS[kind]).gradients
    return StepPicture(timeline, shown, gradients, f"seconds, estimated for {kind}")


def likely_gpu(plan: RunPlan) -> tuple[str, Gpu]:
    """Return the GPU of `gpu_type`, or else the one that fits `gpu_memory_gib` and `peak_theoretical_tflops` best.

    Returns:
        Its name in the table, and its row.
    """
    asked = plan.config.runner.gpu_type
    if asked is not None:
        return asked, GPUS[asked]
    memory = plan.config.runner.gpu_memory_gib
    peak = plan.config.logging.peak_theoretical_tflops or GPUS["h100"].peak_tflops

    def distance(name: str) -> tuple[float, float]:
        gpu = GPUS[name]
        of_memory = abs(gpu.memory_gib - memory) / memory
        if of_memory <= _SAME_MEMORY:
            of_memory = 0.0
        return of_memory, abs(gpu.peak_tflops - peak)

    name = min(GPUS, key=distance)
    return name, GPUS[name]
