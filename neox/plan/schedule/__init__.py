"""Learning rate of each step: gpt-neox's schedules, and DeepSpeed's."""

from neox.plan.schedule.choice import schedule_of
from neox.plan.schedule.gpt_neox import FINAL_DECAYS, Annealing, Schedule, WarmupStableDecay

__all__ = ["FINAL_DECAYS", "Annealing", "Schedule", "WarmupStableDecay", "schedule_of"]
