"""Optimizers, parameter groups and the learning-rate schedule."""

from neox.optim.build import CLASSES, build_optimizer
from neox.optim.clipping import ClippedOptimizer, NormScope
from neox.optim.groups import parameter_groups, planned_groups
from neox.optim.schedule import LRSchedule

__all__ = [
    "CLASSES",
    "ClippedOptimizer",
    "LRSchedule",
    "NormScope",
    "build_optimizer",
    "parameter_groups",
    "planned_groups",
]
