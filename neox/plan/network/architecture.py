"""Derivation of the `Architecture` and its layer plan from a configuration, a checkpoint's settings, and back."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from neox.architecture import Architecture, LayerPlan, Lora, NetworkFields, add_adapters, build_layer_plan
from neox.config.neox_config import NeoXConfig, key_sections, section_classes
from neox.config.sections.base import Section
from neox.errors import ConfigError
from neox.plan.network.architecture_keys import ARCHITECTURE_KEYS, FIELD_KEYS
from neox.plan.network.parameter_groups import with_parameter_groups, with_trained_rows

# Stored by every program that writes a checkpoint's settings. Those without the key `objective` train causal networks.
_STORED_BY_ALL = "hidden_size"


def architecture_keys(field: str) -> tuple[str, ...]:
    """Return the YAML keys that a field of `Architecture` follows from; none for one that no key decides."""
    if field not in FIELD_KEYS:
        return ()
    return FIELD_KEYS[field].keys


def architecture_settings(config: NeoXConfig) -> dict[str, Any]:
    """Return `ARCHITECTURE_KEYS` with their values, as checkpoints store them."""
    settings = {}
    for key in ARCHITECTURE_KEYS:
        value = config.value(key)
        if isinstance(value, Section):
            value = value.model_dump(exclude_none=True)
        settings[key] = value
    return settings


def architecture_of(config: NeoXConfig) -> Architecture:
    """Return the architecture of a configuration that `static_problems` finds nothing wrong with."""
    settings = architecture_settings(config)
    fields = {}
    for name, row in FIELD_KEYS.items():
        values = [settings[key] for key in row.keys]
        fields[name] = row.read(*values)
    return Architecture(**fields)


def yaml_keys(architecture: Architecture) -> dict[str, Any]:
    """Return the YAML keys of an architecture: `architecture_of` is the inverse, as far as keys can express it."""
    keys: dict[str, Any] = {}
    for row in FIELD_KEYS.values():
        keys |= row.write(architecture)
    return keys


def saved_architecture(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint's settings tell about its architecture.

    Args:
        settings: YAML key -> value, as far as a checkpoint (gpt-neox's, too) stores them; other keys are ignored.

    Returns:
        Field of `Architecture` -> value, without the fields that need a key which is missing or not understood.
    """
    found = {}
    for name, row in FIELD_KEYS.items():
        needed = row.needed or (_STORED_BY_ALL,)
        if any(key not in settings for key in needed):
            continue
        values = [_saved(settings, key) for key in row.keys]
        with suppress(ConfigError, TypeError, ValueError, ZeroDivisionError, KeyError):
            found[name] = row.read(*values)
    return found


def _saved(settings: Mapping[str, Any], key: str) -> Any:
    """Return a checkpoint's value of a key; the default of one that did not exist yet when it was written."""
    if key in settings:
        return settings[key]
    section = section_classes()[key_sections()[key]]
    return section.model_fields[key].default


def setting_differences(
    saved: Mapping[str, Any], config: NeoXConfig, among: NetworkFields = NetworkFields.ALL
) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which a checkpoint's network is another one.

    Args:
        saved: YAML key -> value, as far as the checkpoint stores them; only these are compared.
        config: The configuration that loads it.
        among: The fields of the network whose settings are compared.

    Returns:
        Key -> (the checkpoint's value, this configuration's).
    """
    settings = architecture_settings(config)
    differences = architecture_of(config).differences(saved_architecture(saved), among)
    changed = {}
    for difference in differences:
        for key in FIELD_KEYS[difference.field].keys:
            before = _saved(saved, key)
            if before != settings[key]:
                changed[key] = (before, settings[key])
    return changed


def layer_plan(config: NeoXConfig, vocab_size: int, tp_size: int) -> LayerPlan:
    """Return the layer plan of a configuration that `static_problems` finds nothing wrong with.

    Args:
        config: The configuration.
        vocab_size: Number of ids of the tokenizer.
        tp_size: Number of tensor ranks, on which the padding of the vocabulary depends.
    """
    return plan_layers(config, architecture_of(config), padded_vocabulary(config, vocab_size, tp_size), vocab_size)


def plan_layers(config: NeoXConfig, architecture: Architecture, padded_vocab_size: int, vocab_size: int) -> LayerPlan:
    """Return the layers of a run, with what is trained of them.

    Args:
        config: The configuration.
        architecture: Its network.
        padded_vocab_size: Rows of the embedding over all tensor ranks.
        vocab_size: Ids that text may have, before padding.
    """
    layers = build_layer_plan(architecture, padded_vocab_size, head_parallelism=config.model.output_layer_parallelism)
    return trained_layers(layers, config, vocab_size)


def trained_layers(layers: LayerPlan, config: NeoXConfig, vocab_size: int) -> LayerPlan:
    """Return the layers of a network with adapters, and with what is said of their parameters' updates."""
    layers = with_parameter_groups(with_adapters(layers, config), config)
    if config.tokenizer.train_only_added_tokens:
        added = len(config.tokenizer.added_tokens)
        layers = with_trained_rows(layers, first=vocab_size - added, number=added)
    return layers


def with_adapters(layers: LayerPlan, config: NeoXConfig) -> LayerPlan:
    """Return the layers with the adapters that `lora` asks for."""
    keys = config.training.lora
    if keys is None:
        return layers
    return add_adapters(layers, Lora(keys.r, keys.alpha, keys.target))


def used_vocabulary(config: NeoXConfig, vocab_size: int) -> int:
    """Return the number of ids that text may have: those of the tokenizer for which the embedding has rows.

    An imported model keeps the rows of its embedding, and published tokenizers may have more ids than that (a padding
    token that was added for batches). As in transformers, such a model works with every text that lacks them.

    Args:
        config: The configuration.
        vocab_size: Number of ids of the tokenizer.
    """
    rows = config.tokenizer.padded_vocab_size
    if rows is None or config.model.hf_architecture is None or config.tokenizer.added_tokens:
        return vocab_size
    return min(vocab_size, rows)


def padded_vocabulary(config: NeoXConfig, vocab_size: int, tp_size: int) -> int:
    """Return the rows of the embedding over `tp_size` tensor ranks: vocab_size rounded up, or padded_vocab_size."""
    multiple = config.model.make_vocab_size_divisible_by * tp_size
    return config.tokenizer.padded_vocab_size or -(-vocab_size // multiple) * multiple
