"""How weights move: AdamW, its parameter groups, and the learning-rate schedule."""

from neox.optim.adamw import ClippingAdamW, NormScope, build_optimizer
from neox.optim.groups import parameter_groups
from neox.optim.schedule import LRSchedule, Schedule, schedule_of

__all__ = [
    "ClippingAdamW",
    "LRSchedule",
    "NormScope",
    "Schedule",
    "build_optimizer",
    "parameter_groups",
    "schedule_of",
]
