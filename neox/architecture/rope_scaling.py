"""Scaling of rotary frequencies on paper: the types of Hugging Face's `rope_scaling` that are computed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from neox.architecture.architecture import Pairs


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
    settings = {("rope_type" if k == "type" else k): v for k, v in (given or {}).items() if v is not None}
    return () if settings.get("rope_type", "default") == "default" else tuple(sorted(settings.items()))


def rope_scaling_problem(given: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a dictionary, or None."""
    settings = {key: value for key, value in given.items() if value is not None}
    kind = settings.pop("rope_type", settings.pop("type", "default"))
    if kind not in ROPE_SCALINGS:
        reason = ": its frequencies change with the length of each sequence" if kind in ("dynamic", "longrope") else ""
        return f"has rope_type {kind!r}, which is not supported{reason}; use one of {', '.join(ROPE_SCALINGS)}"
    settings.pop("type", None)
    scaling = ROPE_SCALINGS[kind]
    if missing := [name for name in scaling.required if name not in settings]:
        return f"of type {kind} lacks {', '.join(missing)}"
    if unknown := sorted(set(settings) - {*scaling.required, *scaling.optional}):
        known = ", ".join((*scaling.required, *scaling.optional)) or "none"
        return f"of type {kind} has no setting {', '.join(unknown)}; known: {known}"
    for name, value in settings.items():
        wanted = bool if name == "truncate" else (int, float)
        if not isinstance(value, wanted) or (isinstance(value, bool) and name != "truncate"):
            return f"has {name}: {value!r}, which should be {'true or false' if name == 'truncate' else 'a number'}"
        if name != "truncate" and value <= 0:
            return f"has {name}: {value!r}, which should be above 0"
    if kind == "llama3" and settings["high_freq_factor"] <= settings["low_freq_factor"]:
        return "needs a high_freq_factor above low_freq_factor"
    return None
