"""Memory that a run needs on one rank: weights, gradients, optimizer states, activations, and what is offloaded."""

from neox.plan.memory.estimate import MemoryPlan, fullest_stage, stage_memory

__all__ = ["MemoryPlan", "fullest_stage", "stage_memory"]
