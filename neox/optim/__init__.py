"""Optimizers, parameter groups and the learning-rate schedule."""

from neox.optim.classes import CLASSES, build_optimizer
from neox.optim.clipping import EXPERTS, ClippedOptimizer, ExpertGroups, NormScope
from neox.optim.groups import is_hidden, parameter_groups, planned_groups
from neox.optim.muon import MatrixPart, MatrixShards, Muon
from neox.optim.schedule import LRSchedule

__all__ = [
    "CLASSES",
    "EXPERTS",
    "ClippedOptimizer",
    "ExpertGroups",
    "LRSchedule",
    "MatrixPart",
    "MatrixShards",
    "Muon",
    "NormScope",
    "build_optimizer",
    "is_hidden",
    "parameter_groups",
    "planned_groups",
]
