"""Defaults that matter for a run's result and that nobody gave."""

from __future__ import annotations

import json
from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig, yaml_text
from neox.plan.devices.precision import PRECISION_KEYS
from neox.plan.network.norm_keys import epsilon_key
from neox.plan.report.value_sources import all_values
from neox.plan.run_plan import RunPlan

_LINE_WIDTH = 110
_OF_NETWORK = ("norm", "pos_emb", "activation", "no_weight_tying")
_OF_TRAINING = ("weight_decay", "gradient_clipping", "lr_decay_style")
_DROPOUTS = ("hidden_dropout", "attention_dropout")


def notable_defaults(plan: RunPlan, *, training: bool) -> list[str]:
    """Return `key value` of each default that matters for the result.

    Args:
        plan: The plan of a run.
        training: Whether the model is trained, not only run.
    """
    config = plan.config
    keys = []
    if training:
        keys += [key for key in _DROPOUTS if config.value(key) > 0]
    keys += _OF_NETWORK
    if not plan.architecture.mlp_width:  # no block has an activation to choose
        keys.remove("activation")
    if epsilon := epsilon_key(config.model.norm):
        keys.append(epsilon)
    if training:
        keys += _OF_TRAINING
    shown = [_key_and_value(config, key) for key in keys if config.source(key).is_default]
    if training and not any(map(config.given, PRECISION_KEYS)):
        shown.insert(0, f"precision {plan.precision}")
    if "flash" not in plan.attention and config.source("attention_config").is_default:
        shown.append("attention_config without flash")
    return shown


def all_defaults(config: NeoXConfig) -> Iterator[str]:
    """Yield every key that has its default, with its value, several to a line."""
    line = ""
    for key, _, source in all_values(config):
        if not source.is_default:
            continue
        text = _key_and_value(config, key)
        if not line:
            line = text
        elif len(line) + len(text) > _LINE_WIDTH:
            yield f"{line},"
            line = text
        else:
            line += f", {text}"
    if line:
        yield line


def _key_and_value(config: NeoXConfig, key: str) -> str:
    text = yaml_text(config.value(key))
    if "\n" in text:
        text = json.dumps(text)
    return f"{key} {text}"
