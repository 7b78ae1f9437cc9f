"""Laws across keys, which no single field can check. Each function yields one sentence for each violation."""

from neox.config.laws.collect import missing_for_training, static_problems

__all__ = ["missing_for_training", "static_problems"]
