"""Learning rate of each step: gpt-neox's schedules, and DeepSpeed's."""

from neox.plan.schedule.annealing import Annealing, Schedule, WarmupStableDecay
from neox.plan.schedule.choice import schedule_of

__all__ = ["Annealing", "Schedule", "WarmupStableDecay", "schedule_of"]
