"""Time of a training step, estimated from a workload and the figures of a GPU. Pure and without torch."""

from neox.plan.time.step import StepModel, StepTime, estimate_step

__all__ = ["StepModel", "StepTime", "estimate_step"]
