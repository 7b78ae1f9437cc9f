"""The one room that talks to DeepSpeed."""

from neox.engine.distributed import initialize_distributed
from neox.engine.engine import Engine, StepResult, initialize_engine

__all__ = ["Engine", "StepResult", "initialize_distributed", "initialize_engine"]
