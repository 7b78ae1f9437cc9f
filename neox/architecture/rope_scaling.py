"""Scaling of rotary frequencies on paper: the types of Hugging Face's `rope_scaling` that are computed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from neox.architecture.architecture import Pairs, without_none


@dataclass(frozen=True)
class RopeScaling:
    """One type of scaling.

    Attributes:
        required: Settings that must be given.
        optional: Settings that may be given.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_TRAINED = "original_max_position_embeddings"
ROPE_SCALINGS: Mapping[str, RopeScaling] = MappingProxyType(
    {
        "default": RopeScaling(),
        "linear": RopeScaling(("factor",)),
        "llama3": RopeScaling(("factor", "low_freq_factor", "high_freq_factor", _TRAINED)),
        "yarn": RopeScaling(
            ("factor", _TRAINED),
            ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        ),
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
    return tuple(sorted(settings.items()))


def rope_scaling_problem(given: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a dictionary, or None."""
    settings = without_none(given)
    older_name = settings.pop("type", "default")
    kind = settings.pop("rope_type", older_name)
    if kind not in ROPE_SCALINGS:
        reason = ""
        if kind in ("dynamic", "longrope"):
            reason = ": its frequencies change with the length of each sequence"
        return f"has rope_type {kind!r}, which is not supported{reason}; use one of {', '.join(ROPE_SCALINGS)}"
    scaling = ROPE_SCALINGS[kind]
    known = (*scaling.required, *scaling.optional)
    missing = [name for name in scaling.required if name not in settings]
    if missing:
        return f"of type {kind} lacks {', '.join(missing)}"
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        return f"of type {kind} has no setting {', '.join(unknown)}; known: {', '.join(known) or 'none'}"
    for name, value in settings.items():
        problem = _value_problem(name, value)
        if problem is not None:
            return problem
    if kind == "llama3" and settings["high_freq_factor"] <= settings["low_freq_factor"]:
        return "needs a high_freq_factor above low_freq_factor"
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
