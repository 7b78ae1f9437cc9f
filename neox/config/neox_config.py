"""`NeoXConfig`: flat NeoX keys grouped into typed sections, with the source of every value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from neox.config.flat import (
    Problem,
    look_up,
    normalise,
    source_prefix,
    spread_activation_checkpointing,
    spread_extra_args,
    texts,
    translate_aliases,
)
from neox.config.keys import ALIASES, OTHER_SYSTEMS, UNSUPPORTED, alias_target
from neox.config.sections.base import Section
from neox.config.sections.data import DataConfig, TokenizerConfig
from neox.config.sections.deepspeed import DeepSpeedConfig
from neox.config.sections.generation import GenerationConfig
from neox.config.sections.model import ModelConfig
from neox.config.sections.optimizer import OptimizerConfig, OptimizerSettings
from neox.config.sections.runner import ParallelismConfig, RunnerConfig
from neox.config.sections.schedule import ScheduleConfig
from neox.config.sections.training import CheckpointConfig, LoggingConfig, TrainingConfig
from neox.errors import ConfigError

# What a type error means, in the words of someone who writes YAML.
_TYPE_ERRORS: Mapping[str, str] = MappingProxyType(
    {
        "bool_parsing": "should be true or false",
        "bool_type": "should be true or false",
        "dict_type": "should be a block of `key: value` pairs",
        "float_parsing": "should be a number",
        "float_type": "should be a number",
        "int_from_float": "should be a whole number",
        "int_parsing": "should be a whole number",
        "int_parsing_size": "is too large",
        "int_type": "should be a whole number",
        "model_type": "should be a block of `key: value` pairs",
        "model_attributes_type": "should be a block of `key: value` pairs",
        "string_type": "should be text; write it in quotes",
        "tuple_type": "should be a list, such as [1, 2] or [a, b]",
        "too_long": "has too many values",
    }
)

# What to write instead, where a key's type or name alone does not say it.
_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "optimizer.params.max_grad_norm": "; gradient_clipping is the key for that",
        "rampup_batch_size": "; it is [first size, increment, samples of the ramp-up]",
    }
)


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
        """Validate flat keys into sections.

        Args:
            flat: Key -> value; `-` and `_` are the same, and None unsets.
            sources: Key, or dotted path inside a block -> where it was written.

        Raises:
            ConfigError: Every problem of single keys.
        """
        config, problems = cls.parse(flat, sources or {})
        if config is None:
            raise ConfigError(texts(problems))
        return config

    @classmethod
    def parse(cls, flat: Mapping[str, Any], sources: Mapping[str, str]) -> tuple[NeoXConfig | None, list[Problem]]:
        """Validate flat keys as `from_flat` does, and return the problems beside the configuration or None."""
        given, problems = normalise(flat)
        where = dict(sources)
        problems += spread_extra_args(given, where)
        problems += spread_activation_checkpointing(given, where)
        owners = key_sections()
        problems += [_unknown_key(key, given, where) for key in given if key not in owners and key not in known_keys()]
        values = {key: value for key, value in given.items() if key in owners or key in ALIASES}
        problems += translate_aliases(values, where)
        sections: dict[str, Section] = {}
        for name, section in section_classes().items():
            try:
                sections[name] = section.model_validate({key: values[key] for key in values if owners[key] == name})
            except ValidationError as error:
                problems += [_type_problem(section, dict(detail), where, values) for detail in error.errors()]
        if problems:
            return None, problems
        config = cls.model_validate(sections)
        object.__setattr__(config, "_given", given)
        object.__setattr__(config, "_sources", where)
        return config, []

    def to_flat(self) -> dict[str, Any]:
        """Return the keys that were given, as they were given; `from_flat` reads them back."""
        return dict(self._given)

    def updated(
        self, changes: Mapping[str, Any], *, without: Collection[str] = (), source: str = "given"
    ) -> NeoXConfig:
        """Return this configuration with other flat keys.

        Args:
            changes: Key -> new value.
            without: Keys that are left at their defaults. Aliases of both go too.
            source: Where the new values came from.
        """
        replaced = {*changes, *without}
        given = {
            key: value
            for key, value in self._given.items()
            if not replaced & {key, alias_target(key).partition(".")[0]}
        }
        kept = {path: where for path, where in self._sources.items() if path.partition(".")[0] in given}
        return NeoXConfig.from_flat(given | dict(changes), kept | dict.fromkeys(changes, source))

    def given(self, key: str) -> bool:
        """Whether a flat key (or dotted path) was given rather than left at its default."""
        return look_up(self._given, key)[0]

    def value(self, path: str) -> Any:
        """Return the value of a flat key or of a dotted path into a block; None where the block is unset.

        Aliases and keys without a section have the value that was given.
        """
        key, *inner = path.split(".")
        if key not in key_sections():
            return look_up(self._given, path)[1]
        value = getattr(getattr(self, key_sections()[key]), key)
        for name in inner:
            value = getattr(value, name, None)
        return value

    def source(self, key: str) -> str:
        """Return where a flat key or dotted path came from: `configs/20B.yml:12`, `--set`, `default`."""
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

    def source_prefix(self, key: str) -> str:
        """Return `file:line: ` of a key for the start of a message; nothing where its source is not known."""
        source = self.source(key)
        return "" if source in ("default", "given") else f"{source}: "

    def describe_setting(self, key: str, value: Any = None) -> str:
        """Return `key: value` with its source for the middle of a message.

        Args:
            key: Flat key or dotted path.
            value: Value to show; the key's where None.
        """
        source = self.source(key)
        shown = yaml_text(self.value(key) if value is None else value)
        return f"`{key}: {shown}`" + ("" if source == "given" else f" ({source})")

    def problem(self, key: str, text: str, value: Any = None) -> str:
        """Return the message `file:line: key: value` and `text`.

        Args:
            key: Flat key or dotted path.
            text: What is wrong with the value.
            value: Value to show; the key's where None.
        """
        return f"{self.source_prefix(key)}`{key}: {yaml_text(self.value(key) if value is None else value)}` {text}"


def for_inference(config: NeoXConfig) -> NeoXConfig:
    """Return a training configuration as generation and evaluation read it: on any number of ranks.

    The batch of training and `fp8` are left out, and `lora`: a checkpoint's adapters are added to the weights that are
    read.
    `global_num_gpus` in a file counts the ranks of training and is left out too; given on the command line it counts
    these.
    """
    without = ["train_batch_size", "gradient_accumulation_steps", "rampup_batch_size", "lora", "fp8"]
    if config.source("global_num_gpus") != "--set":
        without.append("global_num_gpus")
    micro = "train_micro_batch_size_per_gpu"
    return config.updated({} if config.source(micro) != "default" else {micro: 1}, without=without)


def yaml_text(value: Any) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, BaseModel):
        return str(value.model_dump(exclude_none=True))
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value)


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
    return tuple(sorted({*key_sections(), *ALIASES, *UNSUPPORTED}))


def is_text_key(key: str) -> bool:
    """Whether a flat key holds text, so that `--set vocab_file=007` stays text."""
    section = key_sections().get(key)
    return section is not None and section_classes()[section].model_fields[key].annotation in (str, str | None)


def _unknown_key(key: str, flat: Mapping[str, Any], sources: Mapping[str, str]) -> Problem:
    if key in OTHER_SYSTEMS:
        text = f"{source_prefix(key, sources)}unknown key `{key}`, another system's; here it is {OTHER_SYSTEMS[key]}"
        return Problem(text, (key,))
    near = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.6)
    hint = f"; did you mean `{near[0]}`?" if near else "; configs/neox_arguments.md lists all keys"
    meant = (alias_target(name) for name in near if name not in flat)
    return Problem(f"{source_prefix(key, sources)}unknown key `{key}`{hint}", (key, *meant))


def _type_problem(
    cls: type[BaseModel], detail: Mapping[str, Any], sources: Mapping[str, str], values: Mapping[str, Any]
) -> Problem:
    """Turn one pydantic error into a message with source, key, value and rule."""
    path = [str(part) for part in detail["loc"]]
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        there = _fields_beside(cls, path, values)
        near = difflib.get_close_matches(path[-1], there, n=1, cutoff=0.6)
        hint = f"; did you mean `{near[0]}`?" if near else _HINTS.get(key, f"; it has {', '.join(there)}")
        block = ".".join(path[:-1])
        text = f"{source_prefix(key, sources)}`{block}` has no key `{path[-1]}`{hint}"
        return Problem(text, (key, *(f"{block}.{name}" for name in near)))
    if detail["type"] == "missing":  # in a list that is too short, the number of its first missing item
        key, rule = ".".join(path[:-1]), "has too few values" if path[-1].isdigit() else f"needs `{path[-1]}`"
    else:
        rule = _TYPE_ERRORS.get(detail["type"]) or str(detail["msg"]).removeprefix("Input ")
    value = detail["input"]
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    shown = shown if len(shown) <= 100 else f"{shown[:97]}..."
    text = f"{source_prefix(key, sources)}`{key}: {shown}` {rule}{_nearest_choice(detail) or _HINTS.get(key, '')}"
    return Problem(text, (key,))


def _nearest_choice(detail: Mapping[str, Any]) -> str:
    """Return a suggestion for a misspelled choice."""
    if detail["type"] != "literal_error" or not isinstance(detail["input"], str):
        return ""
    choices = re.findall(r"'([^']*)'", str(detail["ctx"]["expected"]))
    near = [name for name in choices if name.lower() == detail["input"].lower()]
    near = near or difflib.get_close_matches(detail["input"], choices, n=1, cutoff=0.6)
    return f"; did you mean `{near[0]}`?" if near else ""


def _fields_beside(cls: type[BaseModel], path: list[str], values: Mapping[str, Any]) -> list[str]:
    """Return the names allowed where `path` ends, beside the values that were given."""
    for name in path[:-1]:
        info = cls.model_fields.get(name)
        if info is None:
            return []
        candidates = [info.annotation, *getattr(info.annotation, "__args__", ())]
        inner = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not inner:
            return []
        asked = OptimizerSettings.params_class(look_up(values, "optimizer.type")[1] or "Adam")
        cls = inner[0] if len(inner) == 1 or asked is None else asked
    return list(cls.model_fields)
