"""The one room that talks to DeepSpeed."""

from neox.engine import deepspeed_log  # isort: skip  (before DeepSpeed speaks)
from neox.engine.agreement import from_first_rank
from neox.engine.background import BackgroundSaves, SaveReport
from neox.engine.distributed import initialize_distributed, leave
from neox.engine.engine import Engine, StepResult, initialize_engine
from neox.engine.loading import open_engine
from neox.engine.saving import save_checkpoint

__all__ = [
    "BackgroundSaves",
    "Engine",
    "SaveReport",
    "StepResult",
    "deepspeed_log",
    "from_first_rank",
    "initialize_distributed",
    "initialize_engine",
    "leave",
    "open_engine",
    "save_checkpoint",
]
