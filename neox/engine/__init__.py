"""Training with DeepSpeed: process groups, engines, saving and loading. The only package that imports DeepSpeed."""

from neox.engine import deepspeed_patches  # isort: skip  (its log filters must exist before DeepSpeed is imported)
from neox.engine.background import BackgroundSaves
from neox.engine.build import initialize_engine
from neox.engine.distributed import all_succeeded, from_first_rank, initialize_distributed, shutdown
from neox.engine.engine import Engine
from neox.engine.feature import Feature, MakeFeatures, TrainedModel
from neox.engine.label_weights import EvaluationResult
from neox.engine.loading import build_loaded_model, open_engine, roll_back
from neox.engine.reports import SaveReport, StepReport, StepResult, TrainState
from neox.engine.saving import save_checkpoint
from neox.engine.start import Start

__all__ = [
    "BackgroundSaves",
    "Engine",
    "EvaluationResult",
    "Feature",
    "MakeFeatures",
    "SaveReport",
    "Start",
    "StepReport",
    "StepResult",
    "TrainState",
    "TrainedModel",
    "all_succeeded",
    "build_loaded_model",
    "deepspeed_patches",
    "from_first_rank",
    "initialize_distributed",
    "initialize_engine",
    "open_engine",
    "roll_back",
    "save_checkpoint",
    "shutdown",
]
