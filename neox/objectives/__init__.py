"""Training objectives: what a batch holds, what enters the network, and what the loss is."""

from neox.objectives.causal_lm import CausalLM
from neox.objectives.masked_lm import MaskedLM
from neox.objectives.multi_token import with_tokens_ahead
from neox.objectives.normalization import LOSS_NORMALIZATIONS, LossNormalization
from neox.objectives.objective import Batch, Objective, build_objective, evaluated_objective
from neox.objectives.scores import LinearCombination, Reduction, ScoreTable, unpack_rows

__all__ = [
    "LOSS_NORMALIZATIONS",
    "Batch",
    "CausalLM",
    "LinearCombination",
    "LossNormalization",
    "MaskedLM",
    "Objective",
    "Reduction",
    "ScoreTable",
    "build_objective",
    "evaluated_objective",
    "unpack_rows",
    "with_tokens_ahead",
]
