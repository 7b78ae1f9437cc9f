"""Typed sections: each flat NeoX key belongs to exactly one."""

from neox.config.sections.data import DataConfig, TokenizerConfig
from neox.config.sections.deepspeed import DeepSpeedConfig
from neox.config.sections.generation import GenerationConfig
from neox.config.sections.model import ModelConfig
from neox.config.sections.runner import ParallelismConfig, RunnerConfig
from neox.config.sections.training import (
    CheckpointConfig,
    LoggingConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainingConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DeepSpeedConfig",
    "GenerationConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "RunnerConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainingConfig",
]
