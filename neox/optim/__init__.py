"""Optimizers, parameter groups and the learning-rate schedule."""

from neox.optim.adamw import AdamW, NormScope, build_optimizer, parameter_groups
from neox.optim.schedule import LRSchedule

__all__ = ["AdamW", "LRSchedule", "NormScope", "build_optimizer", "parameter_groups"]
