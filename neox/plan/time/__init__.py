"""Time of a training step, estimated from the network's shape, the layout and the GPU. Pure and without torch."""

from neox.plan.time.gpus import GPUS, Gpu
from neox.plan.time.setting import NetworkShape, StepSetting
from neox.plan.time.step import StepTime, estimate_step

__all__ = ["GPUS", "Gpu", "NetworkShape", "StepSetting", "StepTime", "estimate_step"]
