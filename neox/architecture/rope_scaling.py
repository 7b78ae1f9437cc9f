"""Scaling of rotary frequencies on paper: the types of Hugging Face's `rope_scaling` that are computed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from neox.architecture.architecture import Pairs, frozen, thawed, without_none


@dataclass(frozen=True)
class RopeScaling:
    """One type of scaling.

    Attributes:
        required: Settings that must be given.
        optional: Settings that may be given.
        by_length: Whether frequencies depend on the length of a token's sequence.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    by_length: bool = False


_TRAINED = "original_max_position_embeddings"
_LISTS = ("short_factor", "long_factor")
ROPE_SCALINGS: Mapping[str, RopeScaling] = MappingProxyType(
    {
        "default": RopeScaling(),
        "linear": RopeScaling(("factor",)),
        "llama3": RopeScaling(("factor", "low_freq_factor", "high_freq_factor", _TRAINED)),
        "yarn": RopeScaling(
            ("factor", _TRAINED),
            ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        ),
        "dynamic": RopeScaling(("factor", _TRAINED), by_length=True),
        "longrope": RopeScaling(("factor", *_LISTS, _TRAINED), ("attention_factor",), by_length=True),
    }
)
"""Type (`rope_type` of the dictionary) -> its settings. How it is computed is in `neox.ops.rotary`."""


def rope_scaling_of(given: Mapping[str, Any] | None) -> Pairs:
    """Return a dictionary in its normal form: `rope_type` for the older `type`, without None; () for no scaling."""
    settings = without_none(given or {})
    if "type" in settings:
        settings["rope_type"] = settings.pop("type")
    if settings.get("rope_type", "default") == "default":
        return ()
    return tuple(sorted((name, frozen(value)) for name, value in settings.items()))


def rope_scaling_settings(scaling: Pairs) -> dict[str, Any]:
    """Return the settings of a scaling in Hugging Face's format, as a JSON object; {} for no scaling."""
    return {name: thawed(value) for name, value in scaling}


def rope_scaling_problem(given: Mapping[str, Any], rotary_ndims: int | None = None) -> str | None:
    """Return what is wrong with a dictionary of settings, or None.

    Args:
        given: The dictionary.
        rotary_ndims: Number of rotary dimensions of each head; None if unknown.
    """
    settings = without_none(given)
    older_name = settings.pop("type", "default")
    kind = settings.pop("rope_type", older_name)
    if kind not in ROPE_SCALINGS:
        return f"has rope_type {kind!r}, which is not supported; use one of {', '.join(ROPE_SCALINGS)}"
    scaling = ROPE_SCALINGS[kind]
    known = (*scaling.required, *scaling.optional)
    missing = [name for name in scaling.required if name not in settings]
    if missing:
        return f"of type {kind} lacks {', '.join(missing)}"
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        return f"of type {kind} has no setting {', '.join(unknown)}; known: {', '.join(known) or 'none'}"
    for name, value in settings.items():
        problem = _value_problem(name, value) if name not in _LISTS else _list_problem(name, value, rotary_ndims)
        if problem is not None:
            return problem
    return _relation_problem(kind, settings, rotary_ndims)


def _relation_problem(kind: str, settings: Mapping[str, Any], rotary_ndims: int | None) -> str | None:
    """Return what is wrong with a combination of settings that are valid by themselves, or None."""
    if kind == "llama3" and settings["high_freq_factor"] <= settings["low_freq_factor"]:
        return "needs a high_freq_factor above low_freq_factor"
    if kind in ("dynamic", "longrope") and settings["factor"] < 1:
        return f"has factor: {settings['factor']!r}, which should be at least 1"
    if kind == "dynamic" and rotary_ndims == 2:
        return "of type dynamic needs more than 2 rotary dimensions; increase rotary_pct or head_dim"
    return None


def _list_problem(name: str, values: Any, rotary_ndims: int | None) -> str | None:
    """Return what is wrong with a list of factors, one for each frequency, or None."""
    if not isinstance(values, (list, tuple)):
        return f"has {name}: {values!r}, which should be a list of numbers"
    for value in values:
        problem = _value_problem(name, value)
        if problem is not None:
            return problem
    if rotary_ndims is not None and len(values) != rotary_ndims // 2:
        return f"has {len(values)} numbers in {name}; {rotary_ndims} rotary dimensions need {rotary_ndims // 2}"
    return None


def _value_problem(name: str, value: Any) -> str | None:
    """Return what is wrong with the value of one setting, or None."""
    if name == "truncate":
        return None if isinstance(value, bool) else f"has {name}: {value!r}, which should be true or false"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"has {name}: {value!r}, which should be a number"
    if value <= 0:
        return f"has {name}: {value!r}, which should be above 0"
    return None
