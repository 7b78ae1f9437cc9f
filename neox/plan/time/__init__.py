"""Time of a training step, estimated from configuration, layers, layout and the GPU. Pure and without torch."""

from neox.plan.time.gpus import GPUS, Gpu
from neox.plan.time.step import StepTime, estimate_step
from neox.plan.time.system import TrainingSystem

__all__ = ["GPUS", "Gpu", "StepTime", "TrainingSystem", "estimate_step"]
