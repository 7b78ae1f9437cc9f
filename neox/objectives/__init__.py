"""Training objectives: what a batch holds, what enters the network, and what the loss is."""

from neox.objectives.causal_lm import CausalLM
from neox.objectives.masked_lm import MaskedLM
from neox.objectives.objective import Batch, Objective, build_objective

__all__ = ["Batch", "CausalLM", "MaskedLM", "Objective", "build_objective"]
