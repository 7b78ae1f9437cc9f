"""Entries of `config.json` that several families have: activations, rotary positions, values that must hold."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from neox.architecture import Architecture, Pairs, rope_scaling_of
from neox.errors import ConversionError

PLAIN_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "gelu": "gelu",
        "gelu_tanh": "gelu_new",
        "relu": "relu",
        "silu": "silu",
        "swish": "swish",
        "mish": "mish",
    }
)
"""Ours -> transformers', of an MLP of two projections."""

GATED_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "swiglu": "silu",
        "geglu": "gelu",
        "reglu": "relu",
        "glu": "sigmoid",
        "bilinear": "linear",
    }
)
"""Ours -> transformers', of an MLP with a gate."""

_SAME = MappingProxyType(dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh") | {"swish": "silu"})
"""Other names of one function in transformers -> a name for the function."""


def read_activation(hf: Mapping[str, Any], key: str, known: Mapping[str, str]) -> str:
    """Return our name of an activation.

    Args:
        hf: Contents of `config.json`.
        key: Its key there.
        known: `PLAIN_ACTIVATIONS` or `GATED_ACTIVATIONS`.

    Raises:
        ConversionError: For one that does not exist here.
    """
    name = hf[key]
    exact = (ours for ours, theirs in known.items() if theirs == name)
    same = (ours for ours, theirs in known.items() if _SAME.get(theirs, theirs) == _SAME.get(name, name))
    found = next(exact, None) or next(same, None)
    if found is None:
        raise _refused(f"{key}: {name}: only {', '.join(known.values())} are supported")
    return found


def check_entries(
    hf: Mapping[str, Any], *, needed: tuple[str, ...] = (), fixed: Mapping[str, Any] | None = None
) -> None:
    """Check entries of a `config.json`.

    Args:
        hf: Its contents.
        needed: Keys that must be there.
        fixed: Keys that must have one value where they are given.

    Raises:
        ConversionError: With every reason.
    """
    problems = [f"{key} is missing" for key in needed if hf.get(key) is None]
    problems += [
        f"{key}: {hf[key]}: only {value} is supported"
        for key, value in (fixed or {}).items()
        if hf.get(key, value) != value
    ]
    if problems:
        raise _refused(*problems)


def read_rotary(
    hf: Mapping[str, Any], *, base: str = "rope_theta", fraction: str = "partial_rotary_factor"
) -> tuple[float, float | None, Pairs]:
    """Return the rotary base, the rotated fraction (None if not given) and the scaling of a `config.json`.

    Args:
        hf: Its contents, of transformers 4 or 5.
        base: Key of the base beside `rope_parameters`.
        fraction: Key of the fraction beside `rope_parameters`.
    """
    rope = {**(hf.get("rope_parameters") or {}), **(hf.get("rope_scaling") or {})}
    theta = rope.pop("rope_theta", None)
    part = rope.pop("partial_rotary_factor", None)
    if "rope_type" in rope:
        rope.pop("type", None)  # the older name, which transformers writes too
    part = hf.get(fraction) if part is None else part
    theta = hf.get(base, 10000.0) if theta is None else theta
    return float(theta), None if part is None else float(part), rope_scaling_of(rope)


def write_rotary(architecture: Architecture, *, base: str = "rope_theta") -> dict[str, Any]:
    """Return the entries of rotary positions.

    transformers 4 reads the key `base` and `rope_scaling`, transformers 5 `rope_parameters`.
    """
    theta, scaling = architecture.rotary_base, dict(architecture.rope_scaling)
    return {
        base: int(theta) if theta.is_integer() else theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": theta},
    }


def _refused(*reasons: str) -> ConversionError:
    return ConversionError("this Hugging Face model cannot be imported:\n  " + "\n  ".join(reasons))
