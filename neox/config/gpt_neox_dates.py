"""What keys meant in the gpt-neox of a date, and what their defaults were (docs/gpt-neox-files.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from types import MappingProxyType
from typing import Any

from neox.config.flat import FlatKeys, look_up
from neox.config.gated_widths import LLAMA_MULTIPLE, geglu_width_of_v2, round_up, width_of_each_half
from neox.config.keys import NEOX_KEYS
from neox.config.older_keys import holds_converted_mlp
from neox.config.sections.training import date_of_gpt_neox

VERSION = "gpt_neox_version"
"""Key of the date, or of the release."""

# Days on which a meaning changed, with gpt-neox's pull requests.
_GEGLU_OF_TWO = date(2023, 4, 3)  # 868: a `geglu` MLP is 2 x hidden_size wide
_LATER_SCHEDULE = date(2023, 8, 7)  # 1008: other formulas of the learning rate
_GEGLU_OF_A_THIRD = date(2024, 9, 7)  # 1212: a `geglu` MLP is 4/3 x hidden_size wide, in multiples of 256
_MULTIPLES_ARE_A_KEY = date(2024, 9, 10)  # 1276: `mlp_multiple_of` replaces 256; `mlp_type: llama` is gone
_EPSILON_INSIDE = date(2025, 5, 9)  # 1345: RMSNorm adds its epsilon inside of the root
_KEYS_OF_WIDTH = ("intermediate_size", "expansion_factor", "mlp_multiple_of", "mlp_width")


@dataclass(frozen=True)
class ChangedDefault:
    """A default that gpt-neox has changed after v2.0.

    Attributes:
        since: Date of the change.
        value: Default from then on.
        names: Keys and dotted paths that give this setting; if one is there, the default does not count.
    """

    since: date
    value: Any
    names: tuple[str, ...]


CHANGED_DEFAULTS: Mapping[str, ChangedDefault] = MappingProxyType(
    {
        "hidden_dropout": ChangedDefault(date(2023, 12, 26), 0.0, ("hidden_dropout",)),
        "attention_dropout": ChangedDefault(date(2023, 12, 26), 0.0, ("attention_dropout",)),
        "weight_decay": ChangedDefault(date(2023, 12, 26), 0.1, ("weight_decay", "optimizer.params.weight_decay")),
        "weighted_sampler_alpha": ChangedDefault(date(2023, 12, 26), 1.0, ("weighted_sampler_alpha",)),
    }
)
"""Pull request 1107. (`gradient_clipping: 1.0` of pull request 819 never reached DeepSpeed, see #1432.)"""


def used_defaults(values: Mapping[str, Any]) -> Mapping[str, ChangedDefault]:
    """Return the changed defaults of the keys that have an effect next to given values."""
    unused = () if values.get("weight_by_num_documents") else ("weighted_sampler_alpha",)
    return {key: changed for key, changed in CHANGED_DEFAULTS.items() if key not in unused}


def apply_date(keys: FlatKeys) -> None:
    """Give keys the meaning, and absent keys the default, that they had in the gpt-neox that the file is of.

    Its date is `gpt_neox_version`. Without it, a key that gpt-neox has removed later tells that the file is older; only
    `norm` follows from that.
    """
    day = None
    if VERSION in keys.values:
        day = date_of_gpt_neox(str(keys.values[VERSION]))
    if day is not None:
        _set_defaults(keys, day)
        _set_geglu_width(keys, day)
        if day < _LATER_SCHEDULE and not keys.values.get("scheduler"):
            _set_absent(keys, "lr_schedule_version", "v2.0")
    elif not holds_converted_mlp(keys.values):
        day = latest_date(keys.values)
    if day is not None and day < _EPSILON_INSIDE and keys.values.get("norm") == "rmsnorm":
        keys.values["norm"] = "rmsnorm_v2.0"


def latest_date(values: Mapping[str, Any]) -> date | None:
    """Return the last day on which gpt-neox knew all of the given keys; None if it still knows them."""
    removals = []
    for key in values:
        row = NEOX_KEYS.get(key)
        if row is not None and row.removed is not None:
            removals.append(row.removed)
    if values.get("mlp_type") == "llama":
        removals.append(_MULTIPLES_ARE_A_KEY)
    if not removals:
        return None
    return min(removals) - timedelta(days=1)


def keys_since(values: Mapping[str, Any], day: date) -> Iterator[str]:
    """Yield the given keys of the network that came to gpt-neox on a day or later, and whose values are not off."""
    for key, value in values.items():
        row = NEOX_KEYS.get(key)
        if row is None or row.section not in ("model", "experts", "recurrent") or row.is_off(value):
            continue
        if row.added is not None and row.added >= day:
            yield key


def geglu_width(hidden: int, day: date) -> int:
    """Return the width of a `geglu` MLP for which no key gives a width, in the gpt-neox of a day."""
    if day < _GEGLU_OF_TWO:
        return geglu_width_of_v2(hidden)
    if day < _GEGLU_OF_A_THIRD:
        return 2 * hidden
    width = width_of_each_half(4 * hidden)
    if day < _MULTIPLES_ARE_A_KEY:
        return round_up(width, LLAMA_MULTIPLE)
    return width


def _set_geglu_width(keys: FlatKeys, day: date) -> None:
    values = keys.values
    hidden = values.get("hidden_size")
    if values.get("activation") == "geglu" and isinstance(hidden, int) and values.keys().isdisjoint(_KEYS_OF_WIDTH):
        _set_absent(keys, "mlp_width", geglu_width(hidden, day))


def _set_defaults(keys: FlatKeys, day: date) -> None:
    for key, changed in used_defaults(keys.values).items():
        if day >= changed.since and not any(look_up(keys.values, name)[0] for name in changed.names):
            _set_absent(keys, key, changed.value)


def _set_absent(keys: FlatKeys, key: str, value: Any) -> None:
    """Set a key that is not given; problems with it are shown at the date, from which it follows."""
    keys.values.setdefault(key, value)
    keys.sources.setdefault(key, keys.source(VERSION))
