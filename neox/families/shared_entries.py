"""Entries of `config.json` that several families list: activations, rotary positions, windows, dtype and ids.

Their base classes, the kinds of entries, are in `entries`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from neox.architecture import Architecture, rope_scaling_of, rope_scaling_settings
from neox.families.config_entries import (
    REQUIRED,
    ConfigEntries,
    Fields,
    ModelSettings,
    Number,
    Size,
    Written,
    is_number,
    is_whole_number,
)

DTYPES: Mapping[str, str] = MappingProxyType({"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"})
"""`torch_dtype` of `config.json` -> `precision` of the YAML."""

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
"""Activation of an MLP with two projections -> its name in transformers."""

GATED_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "swiglu": "silu",
        "geglu": "gelu",
        "geglu_tanh": "gelu_pytorch_tanh",
        "reglu": "relu",
        "glu": "sigmoid",
        "bilinear": "linear",
    }
)
"""Activation of an MLP with a gate -> name in transformers of the gate's function."""

_OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "swish": "silu",
    }
)
"""Name in transformers -> one name for all that compute the same function."""


@dataclass(frozen=True)
class Activation(ConfigEntries):
    """The activation of the MLP.

    Attributes:
        key: Key in `config.json`.
        names: Our name -> transformers' name. An activation that is not in it is written as the first one.
        default: transformers' name if the entry is missing.
        meant: transformers' name -> our name, for names that mean another function in this family.
    """

    key: str
    names: Mapping[str, str]
    default: str
    meant: Mapping[str, str] = field(default_factory=dict)

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if there is no such activation here."""
        name = hf.get(self.key, self.default)
        if not isinstance(name, str):
            yield f"{self.key}: {name!r}: should be text"
        elif self._ours(name) is None:
            yield f"{self.key}: {name}: only {', '.join(self.names.values())} are supported"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the field `activation`."""
        return {"activation": self._ours(hf.get(self.key, self.default))}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry."""
        first = next(iter(self.names.values()))
        return {self.key: self.names.get(network.activation, first)}

    def _ours(self, name: str) -> str | None:
        """Return our name of an activation of transformers; None if there is none."""
        if name in self.meant:
            return self.meant[name]
        for ours, theirs in self.names.items():
            if theirs == name:
                return ours
        wanted = _OTHER_NAMES.get(name, name)
        for ours, theirs in self.names.items():
            if _OTHER_NAMES.get(theirs, theirs) == wanted:
                return ours
        return None


@dataclass(frozen=True)
class Rotary(ConfigEntries):
    """Rotary positions: `rope_parameters` of transformers 5, and the entries of transformers 4 for the same values.

    Attributes:
        base_key: Key of the base in transformers 4.
        fraction_key: Key of the fraction of each head that is rotated, in transformers 4; empty for a family that
            always rotates whole heads.
        default_fraction: Fraction if no entry gives it.
        default_base: Base if no entry gives it.
        takes_scaling: Whether the family's models have the types of scaling that are computed here.
        default_scaling: Scaling if `config.json` has none.
    """

    base_key: str = "rope_theta"
    fraction_key: str = ""
    default_fraction: float = 1.0
    default_base: float = 10000.0
    takes_scaling: bool = True
    default_scaling: Fields = field(default_factory=dict)

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason for each dictionary that is none, each number that is none, and a scaling that is refused."""
        numbers = {key: hf.get(key) for key in (self.base_key, self.fraction_key)}
        for key in ("rope_parameters", "rope_scaling"):
            given = hf.get(key)
            if given is None:
                continue
            if not isinstance(given, Mapping):
                yield f"{key}: {given!r}: should be a dictionary"
                continue
            for name in ("rope_theta", "partial_rotary_factor"):
                numbers[f"{key}: {name}"] = given.get(name)
            kind = given.get("rope_type", given.get("type"))
            if kind not in (None, "default") and not self.takes_scaling:
                yield f"{key}: rope_type {kind!r} is not supported for this family, only default"
        for key, value in numbers.items():
            if value is not None and not (is_number(value) and value >= 0):
                yield f"{key}: {value!r}: should be a number of at least 0"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the base, the number of rotated dimensions and the scaling.

        Of both dictionaries transformers takes `rope_scaling` alone (5.24, `convert_rope_params_to_dict`).
        """
        rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or self.default_scaling)
        base = _first(rope.pop("rope_theta", None), hf.get(self.base_key), self.default_base)
        fraction = _first(rope.pop("partial_rotary_factor", None), hf.get(self.fraction_key), self.default_fraction)
        if not self.fraction_key:
            fraction = 1.0
        if "rope_type" in rope:
            rope.pop("type", None)  # the older name, which transformers writes too
        _add_lengths(rope, hf, known)
        return {
            "positions": "rotary",
            "rotary_base": float(base),
            "rotary_ndims": int(known["head_dim"] * float(fraction)),
            "rope_scaling": rope_scaling_of(rope),
        }

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entries of both versions of transformers."""
        base = network.rotary_base
        scaling = rope_scaling_settings(network.rope_scaling) if self.takes_scaling else {}
        if scaling.get("rope_type") == "dynamic":
            del scaling[_TRAINED]  # transformers uses max_position_embeddings
        parameters = {"rope_type": "default", **scaling, "rope_theta": base}
        entries: dict[str, Any] = {}
        if self.fraction_key:
            entries[self.fraction_key] = network.rotary_fraction
            parameters["partial_rotary_factor"] = network.rotary_fraction
        entries[self.base_key] = int(base) if base.is_integer() else base
        if scaling.get("rope_type") == "longrope":
            entries[_TRAINED] = scaling[_TRAINED]  # transformers 4 only reads it here
        entries["rope_scaling"] = scaling or None
        entries["rope_parameters"] = parameters
        return entries


_TRAINED = "original_max_position_embeddings"


def _add_lengths(rope: dict[str, Any], hf: Mapping[str, Any], known: Fields) -> None:
    """Add settings that transformers reads from other entries: the length in training, and the factor of `longrope`."""
    kind = rope.get("rope_type", rope.get("type"))
    longest = known["max_positions"]
    if kind == "dynamic":
        rope[_TRAINED] = longest
    if kind == "longrope":
        trained = _first(hf.get(_TRAINED), rope.get(_TRAINED), longest)
        rope[_TRAINED] = trained
        if rope.get("factor") is None and is_number(trained) and trained > 0:
            rope["factor"] = max(1.0, longest / trained)


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


@dataclass(frozen=True)
class TwoRotaries(ConfigEntries):
    """Rotary positions whose base and scaling differ between blocks with and without a window.

    transformers 5 has `rope_parameters` with one dictionary for each kind of block. transformers 4 has single entries;
    its scaling is that of blocks without a window. The entries of attention must be read before.

    Attributes:
        default_base: Base of blocks without a window if no entry gives it.
        local_key: Key of the base of blocks with a window in transformers 4; empty if it is that of the others.
        default_local_base: Base of blocks with a window if no entry gives it; 0 for that of the others.
    """

    default_base: float
    local_key: str = ""
    default_local_base: float = 0.0

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason for each dictionary or number that is none, and for a scaling in a window."""
        numbers = {key: hf.get(key) for key in ("rope_theta", self.local_key) if key}
        both = hf.get("rope_parameters")
        kinds = tuple(LAYER_TYPES.values())
        if not isinstance(both, Mapping | None):
            yield f"rope_parameters: {both!r}: should have a dictionary for each of {', '.join(kinds)}"
            return
        entries = both or {}
        by_kind = {kind: given for kind, given in entries.items() if kind in kinds}
        for name in entries.keys() - by_kind.keys():
            if entries[name] != self._value_without_effect(name, hf, by_kind):
                yield (
                    f"rope_parameters: {name}: {entries[name]!r}: transformers ignores it outside of the dictionaries "
                    f"{' and '.join(kinds)}; move it to the one that it is meant for, or remove it"
                )
        for kind, given in {**by_kind, "rope_scaling": hf.get("rope_scaling")}.items():
            if given is not None and not isinstance(given, Mapping):
                yield f"rope_parameters: {kind}: {given!r}: should be a dictionary"
            elif given is not None:
                numbers[f"rope_parameters: {kind}: rope_theta"] = given.get("rope_theta")
                if kind == LAYER_TYPES["sliding_window"] and given.get("rope_type", "default") != "default":
                    yield f"rope_parameters: {kind}: rope_type {given['rope_type']!r}: only default is supported there"
        for key, value in numbers.items():
            if value is not None and not (is_number(value) and value > 0):
                yield f"{key}: {value!r}: should be a number above 0"

    def _value_without_effect(self, name: str, hf: Mapping[str, Any], by_kind: Mapping[str, Any]) -> Any:
        """Return the value of an entry beside the kinds of blocks that says what holds without it."""
        if name == "rope_theta":
            own = by_kind.get(LAYER_TYPES["global"]) or {}
            return _first(own.get("rope_theta") if isinstance(own, Mapping) else None, hf.get(name), self.default_base)
        return "default" if name in ("rope_type", "type") else None

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return both bases, the number of rotated dimensions and the scaling."""
        both = hf.get("rope_parameters") or {}
        rope = {**(both.get(LAYER_TYPES["global"]) or {}), **(hf.get("rope_scaling") or {})}
        base = float(_first(rope.pop("rope_theta", None), hf.get("rope_theta"), self.default_base))
        if "rope_type" in rope:
            rope.pop("type", None)
        scaling = rope_scaling_of(rope)
        in_window = (both.get(LAYER_TYPES["sliding_window"]) or {}).get("rope_theta")
        local_base = float(_first(in_window, hf.get(self.local_key), self.default_local_base or base))
        has_windows = "sliding_window" in known["attention"]
        if not has_windows or (local_base == base and not scaling):
            local_base = 0.0
        return {
            "positions": "rotary",
            "rotary_base": base,
            "local_rotary_base": local_base,
            "rotary_ndims": known["head_dim"],
            "rope_scaling": scaling,
        }

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entries of both versions of transformers."""
        scaling = rope_scaling_settings(network.rope_scaling)
        base = network.rotary_base
        local_base = network.local_rotary_base or base
        entries: dict[str, Any] = {"rope_theta": base, "rope_scaling": scaling or None}
        if self.local_key:
            entries[self.local_key] = local_base
        entries["rope_parameters"] = {
            LAYER_TYPES["global"]: {"rope_type": "default", **scaling, "rope_theta": base},
            LAYER_TYPES["sliding_window"]: {"rope_type": "default", "rope_theta": local_base},
        }
        return entries


def windowed_blocks(window: int | None, windowed: list[bool]) -> Fields:
    """Return the fields of attention in a sliding window.

    Args:
        window: Keys that a query sees, itself included; None for all of them.
        windowed: Whether the attention of each block has the window.
    """
    if not window or not any(windowed):
        return {"attention": ("global",) * len(windowed), "window": 0}
    kinds = tuple("sliding_window" if has_window else "global" for has_window in windowed)
    return {"attention": kinds, "window": window}


@dataclass(frozen=True)
class WindowInAllBlocks(ConfigEntries):
    """`sliding_window`: number of keys that attention in every block sees; null for all of them.

    Attributes:
        default: Value of a missing entry.
    """

    default: int | None

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if the entry is neither a size nor null."""
        return Size("sliding_window", "window", self.default, null=0).problems(hf)

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the attention of all blocks."""
        window = hf.get("sliding_window", self.default)
        return windowed_blocks(window, [True] * known["num_layers"])

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry."""
        return {"sliding_window": network.window or None}


LAYER_TYPES: Mapping[str, str] = MappingProxyType({"global": "full_attention", "sliding_window": "sliding_attention"})
"""Attention of a block -> its name in `layer_types` of `config.json`."""


def layer_types(network: Architecture) -> list[str]:
    """Return `layer_types` of `config.json`. Attention that transformers lacks is written as full attention."""
    return [LAYER_TYPES.get(kind, "full_attention") for kind in network.attention]


def layer_types_problems(hf: Mapping[str, Any]) -> Iterator[str]:
    """Yield a reason if `layer_types` is not a list of known types, one for each block."""
    types = hf.get("layer_types")
    if types is None:
        return
    known = [*LAYER_TYPES.values()]
    if not isinstance(types, list) or any(kind not in known for kind in types):
        yield f"layer_types: {types!r}: should be a list of {' and '.join(known)}"
    elif len(types) != hf.get("num_hidden_layers"):
        yield f"layer_types: has {len(types)} entries for num_hidden_layers: {hf.get('num_hidden_layers')}"


@dataclass(frozen=True)
class WindowPattern(ConfigEntries):
    """Attention of each block: `layer_types`, or else a window in all but each so-many-th block.

    Attributes:
        every: Blocks from one without a window to the next, if no entry gives them.
        default_window: Value of a missing `sliding_window`.
    """

    every: int
    default_window: int = 4096

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason for each of the three entries that is wrong."""
        yield from Size("sliding_window", "window", self.default_window).problems(hf)
        yield from Size("sliding_window_pattern", "every", self.every).problems(hf)
        yield from layer_types_problems(hf)

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the attention of all blocks and the window."""
        types = hf.get("layer_types")
        if types is not None:
            windowed = [kind == LAYER_TYPES["sliding_window"] for kind in types]
        else:
            every = hf.get("sliding_window_pattern", self.every)
            windowed = [(block + 1) % every != 0 for block in range(known["num_layers"])]
        return windowed_blocks(hf.get("sliding_window", self.default_window), windowed)

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entries. transformers needs a window even if no block has it."""
        return {"sliding_window": network.window or self.default_window, "layer_types": layer_types(network)}


class HeadsDivideHidden(ConfigEntries):
    """The hidden size, which transformers requires to be a multiple of the number of heads, whatever their width."""

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if it is not."""
        hidden = hf.get("hidden_size")
        heads = hf.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads:
            yield f"hidden_size: {hidden}: should be a multiple of num_attention_heads: {heads}"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the largest hidden size that transformers accepts."""
        heads = known["num_attention_heads"]
        return {"hidden_size": known["hidden_size"] // heads * heads}


class Dtype(ConfigEntries):
    """`torch_dtype`, or `dtype` of transformers 5. Another one than the three that are trained is read as fp32."""

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the precision."""
        name = hf.get("torch_dtype") or hf.get("dtype")
        return {"dtype": DTYPES.get(str(name), "fp32")}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry."""
        names = {precision: name for name, precision in DTYPES.items()}
        return {"torch_dtype": names[settings.dtype]}


@dataclass(frozen=True)
class TokenId(ConfigEntries):
    """The id of a special token, or null. The first one of several is read."""

    key: str
    field: str

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if the entry is not an id, a list of ids or null."""
        value = hf.get(self.key)
        ids = value if isinstance(value, list) else [value]
        if value is not None and not all(map(is_whole_number, ids)):
            yield f"{self.key}: {value!r}: should be a token id"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the id."""
        value = hf.get(self.key)
        if isinstance(value, list):
            value = next(iter(value), None)
        return {self.field: value}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry."""
        return {self.key: getattr(settings, self.field)}


def ending_entries(
    vocab_size: Any = REQUIRED, *, deviation_key: str = "initializer_range"
) -> tuple[ConfigEntries, ...]:
    """Return the entries with which the `config.json` of every family ends.

    Args:
        vocab_size: transformers' default, if it has one.
        deviation_key: Key of the standard deviation of initial weights.
    """
    return (
        Size("vocab_size", "vocab_size", vocab_size),
        Number(deviation_key, "initializer_range", 0.02),
        TokenId("bos_token_id", "bos"),
        TokenId("eos_token_id", "eod"),
        Written("use_cache", True),
        Dtype(),
    )
