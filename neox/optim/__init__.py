"""Optimizers, parameter groups and the learning-rate schedule."""

from neox.optim.adamw import ClippingAdamW, NormScope, build_optimizer, parameter_groups
from neox.optim.schedule import LRSchedule, Schedule

__all__ = ["ClippingAdamW", "LRSchedule", "NormScope", "Schedule", "build_optimizer", "parameter_groups"]
