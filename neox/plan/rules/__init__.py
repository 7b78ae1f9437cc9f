"""Rules across keys, which no single field can check, and notes on settings without effect.

Nothing here depends on the number of ranks or on the tokenizer; `resolve` adds those checks.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from neox.config.keys import REPLACEABLE, UNSUPPORTED
from neox.config.neox_config import NeoXConfig
from neox.config.sections.base import OnlyWith, any_of, conditions_of
from neox.plan.attention_config import attention_impls, described_kinds
from neox.plan.rules.network import network_problems
from neox.plan.rules.optimizer import optimizer_notes, optimizer_problems
from neox.plan.rules.run import run_problems
from neox.plan.rules.schedule import schedule_notes, schedule_problems
from neox.problems import Note, Problem

__all__ = ["missing_for_training", "notes_without_effect", "static_problems"]


def static_problems(config: NeoXConfig) -> list[Problem]:
    """Return the problems of all rules that a configuration breaks."""
    rules = (_unsupported_problems, network_problems, optimizer_problems, run_problems, schedule_problems)
    return [problem for rule in rules for problem in rule(config)]


def notes_without_effect(config: NeoXConfig) -> list[Note]:
    """Return a note for each given key that changes nothing here."""
    return [
        *_unsupported_notes(config),
        *_idle_notes(config),
        *optimizer_notes(config),
        *schedule_notes(config),
        *_save_notes(config),
        *_replacement_notes(config),
        *_attention_notes(config),
        *_parallel_notes(config),
    ]


def missing_for_training(config: NeoXConfig) -> list[Problem]:
    """Return a problem for each key that training needs and that is not given, apart from data and tokenizer."""
    if config.training.train_iters is None and config.training.num_train_epochs is None:
        message = "`train_iters` is missing: give the number of training iterations, or num_train_epochs"
        return [config.problem_about(message, "train_iters", "num_train_epochs")]
    return []


def _unsupported_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield given keys of gpt-neox that ask for a feature that does not exist here."""
    for name, value in config.to_flat().items():
        key = UNSUPPORTED.get(name)
        if key is not None and key.status == "refused" and not key.is_off(value):
            yield config.problem(name, f"does not work here: {key.reason}")


def _unsupported_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield given keys of gpt-neox that are `dormant` or have `no effect`."""
    for name, value in config.to_flat().items():
        key = UNSUPPORTED.get(name)
        if key is None or key.status == "refused" or key.is_off(value):
            continue
        reason = f"it is {key.reason}, which is off" if key.status == "dormant" else key.reason
        yield Note((name,), f"{config.describe_setting(name)} changes nothing: {reason}")


def _idle_notes(config: NeoXConfig) -> list[Note]:
    """Return a message for each set of conditions that are off though keys which need one of them were given."""
    idle: dict[tuple[OnlyWith, ...], list[str]] = {}
    for section in type(config).model_fields:
        for path, info in _given_fields(getattr(config, section), ""):
            conditions = conditions_of(info)
            if conditions and not any(condition.is_on(config.value(condition.key)) for condition in conditions):
                idle.setdefault(conditions, []).append(path)
    notes = []
    for conditions, keys in idle.items():
        settings = ", ".join(map(config.describe_setting, keys))
        verb = "has" if len(keys) == 1 else "have"
        notes.append(Note(tuple(keys), f"{settings} {verb} no effect: only with {any_of(conditions)}"))
    return notes


def _replacement_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield keys that a later file has replaced, with both places."""
    for key in sorted(REPLACEABLE):
        if config.given(key) and config.source(key).replaces is not None:
            yield Note((key,), config.describe_setting(key))


def _given_fields(block: BaseModel, prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Yield path and field of every key of a block that was given another value than its default."""
    for key in sorted(block.model_fields_set):
        info, value = type(block).model_fields[key], getattr(block, key)
        if isinstance(value, BaseModel):
            yield from _given_fields(value, f"{prefix}{key}.")
        elif value != info.get_default(call_default_factory=True):
            yield f"{prefix}{key}", info


def _attention_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield that `attention_config` describes more blocks than there are, or leaves nothing to recompute."""
    layers = config.model.num_layers or 0
    if (described := len(described_kinds(config.model.attention_config, layers))) > layers:
        key = "attention_config"
        yield Note((key,), f"{config.describe_setting(key)} describes {described} layers: the first {layers} are used")
    training = config.training
    recomputed = training.checkpoint_activations and training.part_to_recompute == "core_attn"
    if recomputed and config.model.pos_emb != "rpe" and {*attention_impls(config)} == {"flash"}:
        key = "recompute_granularity"
        why = "flash attention, which every layer has, keeps no scores to release"
        yield Note((key,), f"{config.describe_setting(key)} changes nothing: {why}")


def _parallel_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield that there are no tensor ranks to divide tokens over."""
    keys = config.parallelism
    if keys.sequence_parallel and keys.model_parallel_size == 1:
        key = "sequence_parallel"
        degree = config.describe_setting("model_parallel_size")
        yield Note((key, "model_parallel_size"), f"{config.describe_setting(key)} changes nothing with {degree}")


def _save_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield save keys without effect."""
    keys, total = config.checkpoint, config.training.train_iters
    if keys.save is None and (keys.checkpoint_factor is not None or keys.extra_save_iters):
        message = "no checkpoint is written: `save` is not set, though checkpoint_factor or extra_save_iters is"
        yield Note(("save", "checkpoint_factor", "extra_save_iters"), message)
    late = [i for i in keys.extra_save_iters or () if total is not None and i > total]
    if late:
        key = "extra_save_iters"
        yield Note((key,), f"{config.describe_setting(key, late)} come after the last iteration, {total}")
