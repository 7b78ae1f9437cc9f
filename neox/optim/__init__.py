"""Optimizers, parameter groups and the learning-rate schedule."""

from neox.optim.adamw import AdamW, NormScope, build_optimizer, parameter_groups
from neox.optim.schedule import LRSchedule, Schedule

__all__ = ["AdamW", "LRSchedule", "NormScope", "Schedule", "build_optimizer", "parameter_groups"]
