"""Training objectives: what a batch holds, what enters the network, and what the loss is."""

from neox.objectives.causal_lm import CausalLM
from neox.objectives.masked_lm import MaskedLM
from neox.objectives.multi_token import with_tokens_ahead
from neox.objectives.normalization import LOSS_NORMALIZATIONS, LossNormalization
from neox.objectives.objective import Batch, Objective, build_objective, evaluated_objective

__all__ = [
    "LOSS_NORMALIZATIONS",
    "Batch",
    "CausalLM",
    "LossNormalization",
    "MaskedLM",
    "Objective",
    "build_objective",
    "evaluated_objective",
    "with_tokens_ahead",
]
