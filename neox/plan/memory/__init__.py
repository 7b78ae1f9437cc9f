"""Memory that a run needs on one rank: weights, gradients, optimizer states, activations, and what is offloaded."""

from neox.plan.memory.estimate import MemoryPlan, fullest_stage, stage_memory
from neox.plan.memory.setting import MemorySetting, at_zero_stage, memory_setting

__all__ = ["MemoryPlan", "MemorySetting", "at_zero_stage", "fullest_stage", "memory_setting", "stage_memory"]
