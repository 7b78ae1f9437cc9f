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


SHAPE: Mapping[str, str] = MappingProxyType(
    {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "mlp_width": "intermediate_size",
        "activation": "hidden_act",
        "max_positions": "max_position_embeddings",
        "tie_word_embeddings": "tie_word_embeddings",
    }
)
"""Field of `Architecture` -> key of the same value in `config.json`, in most families."""


def write_shape(
    architecture: Architecture, activations: Mapping[str, str], keys: Mapping[str, str] = SHAPE
) -> dict[str, Any]:
    """Return the entries of `config.json` that are fields of an architecture.

    Args:
        architecture: The architecture.
        activations: Its activations, ours -> theirs; the first one stands for those it lacks.
        keys: Field -> key.
    """
    entries = {key: getattr(architecture, field) for field, key in keys.items()}
    default = next(iter(activations.values()))
    return {**entries, keys["activation"]: activations.get(architecture.activation, default)}


def read_shape(
    hf: Mapping[str, Any], activations: Mapping[str, str], keys: Mapping[str, str] = SHAPE
) -> dict[str, Any]:
    """Return the fields of an architecture whose blocks all see the whole context; arguments as in `write_shape`."""
    fields = {field: hf[key] for field, key in keys.items()}
    heads = fields["num_attention_heads"]
    return {
        **fields,
        "activation": read_activation(hf, keys["activation"], activations),
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or fields["hidden_size"] // heads,
        "attention": ("global",) * fields["num_layers"],
    }


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


_ACTIVATION_KEYS, _ROPE_KEYS = ("hidden_act", "activation_function"), ("rope_parameters", "rope_scaling")
_WHOLE, _NUMBER, _SWITCH = "a whole number", "a number", "true or false"
_KINDS: Mapping[str, tuple[type, ...]] = MappingProxyType({_WHOLE: (int,), _NUMBER: (int, float), _SWITCH: (bool,)})
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions"),
)
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "n_inner", "rotary_dim", "sliding_window")
_EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps", "initializer_range")
_OPTIONAL_NUMBERS = (
    *("rope_theta", "rotary_emb_base", "rotary_pct", "partial_rotary_factor", "max_window_layers"),
    *("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
)
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_parallel_residual", "use_sliding_window")
_ENTRIES: Mapping[str, tuple[str, float, bool]] = MappingProxyType(
    dict.fromkeys(_SIZES, (_WHOLE, 1, False))
    | dict.fromkeys(_OPTIONAL_SIZES, (_WHOLE, 1, True))
    | dict.fromkeys(_EPSILONS, (_NUMBER, 0, False))
    | dict.fromkeys(_OPTIONAL_NUMBERS, (_NUMBER, 0, True))
    | dict.fromkeys(_SWITCHES, (_SWITCH, 0, False))
)
"""Entry of a `config.json` -> what it is, its least value, and whether it may be null."""


def check_types(hf: Mapping[str, Any]) -> None:
    """Check types and least values of the entries of a `config.json` that are there.

    Raises:
        ConversionError: With every reason.
    """
    problems = []
    for key, (kind, least, optional) in _ENTRIES.items():
        value: Any = hf.get(key)
        if key not in hf or (value is None and optional):
            continue
        right = isinstance(value, _KINDS[kind]) and isinstance(value, bool) == (kind == _SWITCH)
        if not right or value < least:
            problems.append(f"{key}: {value!r}: should be {kind}{'' if kind == _SWITCH else f' of at least {least}'}")
    problems += [
        f"{key}: {hf[key]!r}: should be text" for key in _ACTIVATION_KEYS if not isinstance(hf.get(key, ""), str)
    ]
    problems += [
        f"{key}: {hf[key]!r}: should be a dictionary"
        for key in _ROPE_KEYS
        if not isinstance(hf.get(key) or {}, Mapping)
    ]
    for hidden, heads in (("hidden_size", "num_attention_heads"), ("n_embd", "n_head")):
        if not problems and {hidden, heads} <= hf.keys() and not hf.get("head_dim") and hf[hidden] < hf[heads]:
            problems.append(f"{hidden}: {hf[hidden]}: is less than {heads}: {hf[heads]}")
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
