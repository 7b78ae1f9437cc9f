"""Training with DeepSpeed: process groups, engines, saving and loading. The only package that imports DeepSpeed."""

from neox.engine import deepspeed_patches  # isort: skip  (its log filters must exist before DeepSpeed is imported)
from neox.engine.background import BackgroundSaves, SaveReport
from neox.engine.build import initialize_engine
from neox.engine.distributed import from_first_rank, initialize_distributed, shutdown
from neox.engine.engine import Engine, StepResult
from neox.engine.label_weights import EvaluationResult
from neox.engine.loading import open_engine, roll_back
from neox.engine.reference import answer_log_probs
from neox.engine.saving import save_checkpoint

__all__ = [
    "BackgroundSaves",
    "Engine",
    "SaveReport",
    "EvaluationResult",
    "StepResult",
    "answer_log_probs",
    "deepspeed_patches",
    "from_first_rank",
    "initialize_distributed",
    "initialize_engine",
    "open_engine",
    "roll_back",
    "save_checkpoint",
    "shutdown",
]
