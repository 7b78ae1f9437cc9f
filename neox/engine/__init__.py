"""Training with DeepSpeed: process groups, engines, saving and loading. The only package that imports DeepSpeed."""

from neox.engine import deepspeed_patches  # isort: skip  (its log filters must exist before DeepSpeed is imported)
from neox.engine.build_engine import initialize_engine
from neox.engine.checkpoints.background_saves import BackgroundSaves
from neox.engine.checkpoints.loading import build_loaded_model, open_engine, roll_back
from neox.engine.checkpoints.run_start import RunStart, agree_on_start, check_copies
from neox.engine.checkpoints.saving import save_checkpoint
from neox.engine.device import choose_device
from neox.engine.distributed import all_succeeded, from_first_rank, initialize_distributed, shutdown
from neox.engine.engine import Engine
from neox.engine.feature import Feature, MakeFeatures, TrainedModel, sum_over_ranks
from neox.engine.micro_batches import EvaluationResult
from neox.engine.optimizer_tensors import counted_views, updated_tensors
from neox.engine.reports import SaveReport, StepReport, StepResult, TrainState

__all__ = [
    "BackgroundSaves",
    "Engine",
    "EvaluationResult",
    "Feature",
    "MakeFeatures",
    "SaveReport",
    "RunStart",
    "StepReport",
    "StepResult",
    "TrainState",
    "TrainedModel",
    "agree_on_start",
    "all_succeeded",
    "build_loaded_model",
    "check_copies",
    "choose_device",
    "deepspeed_patches",
    "from_first_rank",
    "initialize_distributed",
    "initialize_engine",
    "open_engine",
    "roll_back",
    "save_checkpoint",
    "shutdown",
    "sum_over_ranks",
    "counted_views",
    "updated_tensors",
]
