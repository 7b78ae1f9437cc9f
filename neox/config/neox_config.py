"""`NeoXConfig`: flat NeoX keys grouped into typed sections, with the source of every value."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from neox.config.bucket_keys import convert_save_address
from neox.config.flat import FlatKeys, look_up, without
from neox.config.gpt_neox_dates import apply_date
from neox.config.key_errors import report_type_errors, report_unknown_key
from neox.config.keys import ALIASES, UNSUPPORTED, UNSUPPORTED_IN_BLOCKS, NeoXKey, alias_target
from neox.config.older_keys import convert_older_keys
from neox.config.sections.base import Section
from neox.config.sections.data import DataConfig, TokenizerConfig
from neox.config.sections.deepspeed import DeepSpeedConfig
from neox.config.sections.distillation import DistillationConfig
from neox.config.sections.experts import ExpertsConfig
from neox.config.sections.generation import GenerationConfig
from neox.config.sections.healing import HealingConfig
from neox.config.sections.model import ModelConfig
from neox.config.sections.optimizer import OptimizerConfig
from neox.config.sections.preferences import PreferenceConfig
from neox.config.sections.recurrent import RecurrentConfig
from neox.config.sections.runner import ParallelismConfig, RunnerConfig
from neox.config.sections.schedule import ScheduleConfig
from neox.config.sections.training import CheckpointConfig, LoggingConfig, TrainingConfig
from neox.errors import ConfigError
from neox.problems import CODE, DEFAULT, Problem, Source


class NeoXConfig(Section):
    """What the user asked for: flat NeoX keys, each in exactly one section.

    Build one with `load_config` or `NeoXConfig.from_flat`.
    """

    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    experts: ExpertsConfig = Field(default_factory=ExpertsConfig)
    recurrent: RecurrentConfig = Field(default_factory=RecurrentConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    preferences: PreferenceConfig = Field(default_factory=PreferenceConfig)
    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    healing: HealingConfig = Field(default_factory=HealingConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    deepspeed: DeepSpeedConfig = Field(default_factory=DeepSpeedConfig)
    runner: RunnerConfig = Field(default_factory=RunnerConfig)

    _given: Mapping[str, Any] = PrivateAttr(default_factory=dict)
    _sources: Mapping[str, Source] = PrivateAttr(default_factory=dict)

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any], sources: Mapping[str, Source] | None = None) -> NeoXConfig:
        """Validate flat keys into sections.

        Args:
            flat: Key -> value; `-` and `_` are the same, and None unsets.
            sources: Key, or dotted path inside a block -> source.

        Raises:
            ConfigError: Every problem of single keys.
        """
        config, problems = cls.parse(flat, sources or {})
        if config is None:
            raise ConfigError(problems)
        return config

    @classmethod
    def parse(cls, flat: Mapping[str, Any], sources: Mapping[str, Source]) -> tuple[NeoXConfig | None, list[Problem]]:
        """Validate flat keys as `from_flat` does.

        Returns:
            The configuration, or None if there are problems; and the problems of single keys.
        """
        keys = FlatKeys.normalised(flat, sources)
        keys.spread_extra_args()
        keys.leave_out_auto()
        keys.spread_activation_checkpointing()
        keys.convert_virtual_stages()
        apply_date(keys)
        convert_older_keys(keys)
        convert_save_address(keys)
        given = dict(keys.values)
        owners = key_sections()
        for key in given:
            if key in owners or key in ALIASES:
                continue
            if key not in UNSUPPORTED:
                report_unknown_key(keys, key, known_keys(), section_classes().values())
            del keys.values[key]
        in_blocks = [path for path in UNSUPPORTED_IN_BLOCKS if look_up(keys.values, path)[0]]
        keys.values = without(keys.values, in_blocks)
        keys.translate_aliases()
        sections: dict[str, Any] = {}
        for name, section in section_classes().items():
            own = {key: value for key, value in keys.values.items() if owners[key] == name}
            if not own:
                sections[name] = section.model_construct()  # defaults are not checked: pydantic builds no validator
                continue
            try:
                sections[name] = section.model_validate(own)
            except ValidationError as error:
                report_type_errors(keys, section, error)
        if keys.problems:
            return None, keys.problems
        config = cls.model_construct(**sections)  # each section has been validated
        object.__setattr__(config, "_given", given)
        object.__setattr__(config, "_sources", keys.sources)
        return config, []

    def to_flat(self) -> dict[str, Any]:
        """Return the keys that were given, as they were given; `from_flat` reads them back."""
        return dict(self._given)

    def updated(
        self,
        changes: Mapping[str, Any],
        *,
        without: Collection[str] = (),
        source: Source | Mapping[str, Source] = CODE,
    ) -> NeoXConfig:
        """Return this configuration with other flat keys.

        Args:
            changes: Key -> new value.
            without: Keys that are left at their defaults. Aliases of both go too.
            source: Source of the new values, or of each of them by key.
        """
        replaced = {*changes, *without}
        given: dict[str, Any] = {}
        for key, value in self._given.items():
            target = alias_target(key).partition(".")[0]
            if not replaced & {key, target}:
                given[key] = value
        sources = {path: place for path, place in self._sources.items() if path.partition(".")[0] in given}
        sources |= dict.fromkeys(changes, source) if isinstance(source, Source) else source
        return NeoXConfig.from_flat(given | dict(changes), sources)

    def given(self, key: str) -> bool:
        """Whether a flat key (or dotted path) was given rather than left at its default."""
        return look_up(self._given, key)[0]

    def value(self, path: str) -> Any:
        """Return the value of a flat key or of a dotted path into a block; None if the block is unset.

        The value of an alias, or of a key without a section, is the one that was given.
        """
        key, *inner = path.split(".")
        if key not in key_sections() or path in UNSUPPORTED:
            return look_up(self._given, path)[1]
        value = getattr(getattr(self, key_sections()[key]), key)
        for name in inner:
            value = getattr(value, name, None)
        return value

    def unsupported(self) -> Iterator[tuple[str, NeoXKey]]:
        """Yield the given keys, or dotted paths, that do not work here and ask for something, with their rows."""
        for given in self._given:
            inside = (path for path in UNSUPPORTED_IN_BLOCKS if path.startswith(f"{given}."))
            refused: list[str] = []  # blocks whose own row says all about their keys
            for path in (given, *inside):
                present, value = look_up(self._given, path)
                row = UNSUPPORTED.get(path)
                if not present or row is None or row.is_off(value) or path.startswith(tuple(refused)):
                    continue
                _, around = look_up(self._given, path.rpartition(".")[0])
                if isinstance(around, Mapping) and _is_switched_off(around):
                    continue
                if row.type == "dict" and row.status == "refused":
                    refused.append(f"{path}.")
                yield path, row

    def source(self, key: str) -> Source:
        """Return the source of a flat key or dotted path, of its alias, or of the block around it."""
        if not self.given(key):
            for name, alias in ALIASES.items():
                if alias.target == key and name in self._given:
                    return self.source(name)
            return DEFAULT
        path = key
        while path:
            if path in self._sources:
                return self._sources[path]
            path = path.rpartition(".")[0]
        return CODE

    def sources(self) -> dict[str, Source]:
        """Return every known source by key or dotted path."""
        return dict(self._sources)

    def describe_setting(self, key: str, value: Any = None) -> str:
        """Return `key: value` with its source for the middle of a message.

        Args:
            key: Flat key or dotted path.
            value: Value to show; the key's if None.
        """
        source = self.source(key)
        shown = self._key_and_value(key, value)
        return f"{shown} ({source})" if source != CODE else shown

    def problem(self, key: str, rule: str, *others: str) -> Problem:
        """Return the problem `key: value` with the rule that the value breaks.

        Args:
            key: Flat key or dotted path.
            rule: What is wrong with the value and what to do, as the rest of a sentence that begins with the setting.
            others: Further keys that the problem depends on.
        """
        return self.problem_about(f"{self._key_and_value(key)} {rule}", key, *others)

    def problem_about(self, message: str, *keys: str) -> Problem:
        """Return a problem with a whole message.

        Args:
            message: What is wrong and what to do.
            keys: All keys that the problem depends on, the one to look at first.
        """
        return Problem(keys, message, self._place(keys[0]))

    def _place(self, key: str) -> Source:
        """Return the source of a key, or of the block around it if only that was given."""
        path = key
        while "." in path and not self.given(path):
            path = path.rpartition(".")[0]
        return self.source(path)

    def _key_and_value(self, key: str, value: Any = None) -> str:
        return f"`{key}: {yaml_text(self.value(key) if value is None else value)}`"


def _is_switched_off(block: Mapping[str, Any]) -> bool:
    """Return whether a block of DeepSpeed says that it is off, so that its other keys ask for nothing."""
    return block.get("enabled", True) is False or block.get("device") == "none"


def for_inference(config: NeoXConfig) -> NeoXConfig:
    """Return a training configuration as generation and evaluation read it: on any number of ranks.

    The batch of training, `fp8`, the division of experts, and what is said of single parameters are left out. So is
    `lora`: a checkpoint's adapters are added to the weights that are read.
    `global_num_gpus` in a file counts the ranks of training and is left out too; on the command line it counts these.
    """
    without = [
        "train_batch_size",
        "gradient_accumulation_steps",
        "rampup_batch_size",
        "lora",
        "fp8",
        "expert_model_parallel_size",
        "parameter_groups",
        "train_only_added_tokens",
    ]
    if not config.source("global_num_gpus").is_command_line:
        without.append("global_num_gpus")
    micro = "train_micro_batch_size_per_gpu"
    missing = {micro: 1} if config.source(micro).is_default else {}
    return config.updated(missing, without=without)


def yaml_text(value: Any) -> str:
    """Return a value as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, BaseModel):
        return str(value.model_dump(exclude_none=True))
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_text, value))}]"
    return str(value)


@cache
def section_classes() -> Mapping[str, type[Section]]:
    """Return section name -> class, in order."""
    classes: dict[str, type[Section]] = {}
    for name, info in NeoXConfig.model_fields.items():
        assert isinstance(info.annotation, type)
        classes[name] = info.annotation
    return MappingProxyType(classes)


@cache
def key_sections() -> Mapping[str, str]:
    """Return flat key -> section name."""
    owners: dict[str, str] = {}
    for section, cls in section_classes().items():
        for key in cls.model_fields:
            assert key not in owners, f"{key} in two sections"
            owners[key] = section
    return MappingProxyType(owners)


@cache
def known_keys() -> tuple[str, ...]:
    """Return every key that means something: sections' keys, aliases, and those known but refused."""
    flat = {*key_sections(), *ALIASES, *UNSUPPORTED}
    return tuple(sorted(flat - {*UNSUPPORTED_IN_BLOCKS}))


def is_text_key(key: str) -> bool:
    """Whether a flat key holds text, so that `--set vocab_file=007` stays text."""
    section = key_sections().get(key)
    return section is not None and section_classes()[section].model_fields[key].annotation in (str, str | None)
