"""Typed sections: each flat NeoX key belongs to exactly one."""

from neox.config.sections.checkpoint import CheckpointConfig
from neox.config.sections.data import DataConfig
from neox.config.sections.deepspeed import DeepSpeedConfig
from neox.config.sections.generation import GenerationConfig
from neox.config.sections.logging import LoggingConfig
from neox.config.sections.model import ModelConfig
from neox.config.sections.neox_config import NeoXConfig
from neox.config.sections.optimizer import OptimizerConfig
from neox.config.sections.parallelism import ParallelismConfig
from neox.config.sections.runner import RunnerConfig
from neox.config.sections.schedule import ScheduleConfig
from neox.config.sections.tokenizer import TokenizerConfig
from neox.config.sections.training import TrainingConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DeepSpeedConfig",
    "GenerationConfig",
    "LoggingConfig",
    "ModelConfig",
    "NeoXConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "RunnerConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainingConfig",
]
