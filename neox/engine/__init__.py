"""The one room that talks to DeepSpeed."""

from neox.engine.distributed import initialize_distributed
from neox.engine.engine import Engine, StepResult, initialize_engine
from neox.engine.loading import open_engine
from neox.engine.saving import save_checkpoint

__all__ = [
    "Engine",
    "StepResult",
    "initialize_distributed",
    "initialize_engine",
    "open_engine",
    "save_checkpoint",
]
