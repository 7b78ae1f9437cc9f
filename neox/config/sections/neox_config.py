"""NeoXConfig: every section together, with where each value came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, PrivateAttr

from neox.config.flat import group, normalise, spread_extra_args
from neox.config.keys import ALIASES
from neox.config.problem import texts
from neox.config.sections.base import Section
from neox.config.sections.checkpoint import CheckpointConfig
from neox.config.sections.data import DataConfig
from neox.config.sections.deepspeed import DeepSpeedConfig
from neox.config.sections.generation import GenerationConfig
from neox.config.sections.logging import LoggingConfig
from neox.config.sections.model import ModelConfig
from neox.config.sections.optimizer import OptimizerConfig
from neox.config.sections.parallelism import ParallelismConfig
from neox.config.sections.runner import RunnerConfig
from neox.config.sections.schedule import ScheduleConfig
from neox.config.sections.tokenizer import TokenizerConfig
from neox.config.sections.training import TrainingConfig
from neox.errors import ConfigError


class NeoXConfig(Section):
    """What the user asked for: flat NeoX keys, each in exactly one section.

    Build one with `load_config` or `NeoXConfig.from_flat`.
    """

    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    deepspeed: DeepSpeedConfig = Field(default_factory=DeepSpeedConfig)
    runner: RunnerConfig = Field(default_factory=RunnerConfig)

    _given: Mapping[str, Any] = PrivateAttr(default_factory=dict)
    _sources: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> NeoXConfig:
        """Validate flat keys (`-` and `_` are the same; None unsets) into sections.

        sources: key, or dotted path inside a block -> where it was written. Raises ConfigError with every problem.
        """
        given, problems = normalise(flat)
        where = dict(sources or {})
        problems += spread_extra_args(given, where)
        grouped = group(cls, given, where)
        if problems or grouped.problems:
            raise ConfigError(texts([*problems, *grouped.problems]))
        config = cls.model_validate(grouped.sections)
        object.__setattr__(config, "_given", given)
        object.__setattr__(config, "_sources", where)
        return config

    def to_flat(self) -> dict[str, Any]:
        """Return the keys that were given, as they were given; `from_flat` reads them back."""
        return dict(self._given)

    def given(self, key: str) -> bool:
        """Whether a flat key (or dotted path) was given rather than left at its default."""
        value: Any = self._given
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return False
            value = value[part]
        return True

    def source(self, key: str) -> str:
        """Where a flat key or dotted path came from: `configs/20B.yml:12`, `--set`, `default`."""
        if not self.given(key):
            aliases = (name for name, alias in ALIASES.items() if alias.target == key and name in self._given)
            return next((self.source(name) for name in aliases), "default")
        path = key
        while path:
            if path in self._sources:
                return self._sources[path]
            path = path.rpartition(".")[0]
        return "given"

    def sources(self) -> dict[str, str]:
        """Return every known source by key or dotted path."""
        return dict(self._sources)
