"""Kinds of entries of `config.json`: how each one is checked, read into our fields, and written from them.

`shared_entries` has particular entries (rotary positions, windows, ids) that several families list.

A family lists its entries in the order of its file. They are read in this order, so an entry may use the fields that
earlier ones have read. "Fields" are those of `Architecture` and of `ModelSettings`, whose names differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import inf, nextafter
from typing import Any, Final

from neox.architecture import Architecture


@dataclass(frozen=True)
class ModelSettings:
    """Contents of `config.json` that are not part of the architecture.

    Attributes:
        dtype: Precision of the weights as in the YAML (`fp32`, `fp16`, `bf16`).
        initializer_range: Standard deviation of initial weights.
        attention_dropout: Dropout probability of attention weights.
        hidden_dropout: Dropout probability of hidden states; 0 for a family that has no entry for it.
        vocab_size: Rows of the embedding.
        eod: End-of-document id, which is Hugging Face's eos.
        bos: Id that begins a text, if the tokenizer has one.
    """

    dtype: str
    initializer_range: float
    attention_dropout: float
    hidden_dropout: float
    vocab_size: int
    eod: int | None
    bos: int | None


SETTINGS = frozenset(field.name for field in fields(ModelSettings))
"""Names of the fields of `ModelSettings`."""

Fields = Mapping[str, Any]
"""Name -> value of fields of `Architecture` and `ModelSettings`."""
Rule = Callable[[Fields], Any]
"""Computes a missing value from the fields that earlier entries have read, such as `query_heads`."""


class ConfigEntries:
    """One entry of `config.json`, or several that belong together. By itself it checks, reads and writes nothing."""

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield the reasons why these entries of a `config.json` cannot be read, each with its key and value."""
        yield from ()

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return fields.

        Args:
            hf: Contents of a `config.json` without problems.
            known: Fields that earlier entries have read.
        """
        return {}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return entries of `config.json`."""
        return {}


class _Marker:
    """Type of the two markers below."""


REQUIRED: Final = _Marker()
"""Default of an entry that must be there."""
REFUSED: Final = _Marker()
"""Meaning of null in an entry that must not be null."""


@dataclass(frozen=True)
class Entry(ConfigEntries):
    """One entry that holds one field.

    Attributes:
        key: Key in `config.json`.
        field: Name of the field.
        default: Value for a missing entry, or a rule for it.
        null: Value that null stands for, or a rule for it.
        other_keys: Further keys under which files hold the same entry. They are read, not written.
    """

    key: str
    field: str
    default: Any = REQUIRED
    null: Any = REFUSED
    other_keys: tuple[str, ...] = ()

    def kind(self) -> str:
        """Return a name of the right values for messages."""
        raise NotImplementedError

    def is_right(self, value: Any) -> bool:
        """Return whether a value has the right type and size."""
        raise NotImplementedError

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if the entry is missing, or of a wrong type or size."""
        given = self._given(hf)
        if not given and self.default is REQUIRED:
            yield f"{self.key} is missing"
        for key, value in given.items():
            if value is None and self.null is not REFUSED:
                continue
            if not self.is_right(value):
                yield f"{key}: {value!r}: should be {self.kind()}"
            elif value != next(iter(given.values())):
                yield f"{key}: {value!r}: contradicts {next(iter(given))}: {next(iter(given.values()))!r}"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the field."""
        value = next(iter(self._given(hf).values()), self.default)
        if value is None:
            value = self.null
        if callable(value):
            value = value(known)
        return {self.field: value}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry."""
        holder = settings if self.field in SETTINGS else network
        return {self.key: getattr(holder, self.field)}

    def _given(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys under which a file holds the entry, with their values."""
        return {key: hf[key] for key in (self.key, *self.other_keys) if key in hf}


@dataclass(frozen=True)
class Size(Entry):
    """A whole number of at least 1."""

    def kind(self) -> str:
        """Return a name of the right values."""
        return "a whole number of at least 1"

    def is_right(self, value: Any) -> bool:
        """Return whether a value has the right type and size."""
        return is_whole_number(value) and value >= 1


@dataclass(frozen=True)
class Count(Entry):
    """A whole number of at least 0."""

    def kind(self) -> str:
        """Return a name of the right values."""
        return "a whole number of at least 0"

    def is_right(self, value: Any) -> bool:
        """Return whether a value has the right type and size."""
        return is_whole_number(value) and value >= 0


@dataclass(frozen=True)
class Number(Entry):
    """A number of at least 0."""

    def kind(self) -> str:
        """Return a name of the right values."""
        return "a number of at least 0"

    def is_right(self, value: Any) -> bool:
        """Return whether a value has the right type and size."""
        return is_number(value) and value >= 0


@dataclass(frozen=True)
class Factor(Entry):
    """A number above 0."""

    def kind(self) -> str:
        """Return a name of the right values."""
        return "a number above 0"

    def is_right(self, value: Any) -> bool:
        """Return whether a value has the right type and size."""
        return is_number(value) and value > 0

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the number as a float."""
        return {self.field: float(super().read(hf, known)[self.field])}


@dataclass(frozen=True)
class Divisor(Factor):
    """A number above 0 whose inverse is the field."""

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the inverse."""
        return {self.field: 1.0 / super().read(hf, known)[self.field]}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the number: a whole one if that has the same inverse."""
        factor = getattr(network, self.field)
        divisor = 1.0 / factor
        nearest = float(round(divisor))
        for candidate in (nearest, divisor, nextafter(divisor, 0.0), nextafter(divisor, inf)):
            if candidate > 0 and 1.0 / candidate == factor:
                return {self.key: candidate}
        return {self.key: divisor}


@dataclass(frozen=True)
class Bound(Factor):
    """A number above 0, or null for none, which is 0 in the field."""

    null: Any = 0.0

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry."""
        return {self.key: getattr(network, self.field) or None}


@dataclass(frozen=True)
class ScoreFactor(Factor):
    """The factor of attention's scores. The usual one, 1 / sqrt(width of a head), is 0 in the field."""

    field: str = "attention_scale"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the factor."""
        return {self.field: _unusual_scale(super().read(hf, known)[self.field], known)}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry."""
        return {self.key: network.attention_scale or network.head_dim**-0.5}


@dataclass(frozen=True)
class ScoreDivisor(Size):
    """The whole number whose root divides attention's scores. The usual one, the width of a head, is 0 in the field."""

    field: str = "attention_scale"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the factor."""
        divisor: int = super().read(hf, known)[self.field]
        return {self.field: _unusual_scale(divisor**-0.5, known)}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the number that is nearest."""
        if not network.attention_scale:
            return {self.key: network.head_dim}
        return {self.key: max(1, round(network.attention_scale**-2))}


def _unusual_scale(scale: float, known: Fields) -> float:
    """Return a factor of scores, or 0 if it is the usual one."""
    if known["head_dim"] < 1:
        return scale  # refused after all entries have been read
    usual: float = known["head_dim"] ** -0.5
    return 0.0 if scale == usual else scale


@dataclass(frozen=True)
class Dropout(Number):
    """A probability. Null stands for 0."""

    default: Any = 0.0
    null: Any = 0.0

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the probability as a float."""
        found = super().read(hf, known)
        return {self.field: float(found[self.field])}


@dataclass(frozen=True)
class UnreadDropout(Dropout):
    """A probability that is written from a field that another entry is read into."""

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return nothing."""
        return {}


@dataclass(frozen=True)
class Switch(Entry):
    """True or false."""

    def kind(self) -> str:
        """Return a name of the right values."""
        return "true or false"

    def is_right(self, value: Any) -> bool:
        """Return whether a value has the right type."""
        return isinstance(value, bool)


@dataclass(frozen=True)
class Choice(Entry):
    """One of several values, each of which stands for a value of the field.

    Attributes:
        values: Value of the entry -> value of the field. A field with another value is written as the last one.
    """

    values: Mapping[Any, Any] = field(kw_only=True)

    def kind(self) -> str:
        """Return a name of the right values."""
        return f"one of {', '.join(map(str, self.values))}"

    def is_right(self, value: Any) -> bool:
        """Return whether a value is one of them; 1 is not true."""
        return any(value == known and type(value) is type(known) for known in self.values)

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the field."""
        found = super().read(hf, known)
        return {self.field: self.values[found[self.field]]}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry."""
        last = next(reversed(self.values))
        names = {value: entry for entry, value in self.values.items()}
        return {self.key: names.get(getattr(network, self.field), last)}


@dataclass(frozen=True)
class Derived(ConfigEntries):
    """A field that no entry holds, because it follows from other fields.

    Attributes:
        field: Name of the field.
        rule: Rule for its value.
    """

    field: str
    rule: Rule

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the field."""
        return {self.field: self.rule(known)}


@dataclass(frozen=True)
class Fixed(ConfigEntries):
    """An entry that holds no field, and must have one value if it is there.

    Attributes:
        key: Key in `config.json`.
        value: The only value that is supported.
    """

    key: str
    value: Any

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if the entry has another value."""
        value = hf.get(self.key, self.value)
        if value != self.value:
            yield f"{self.key}: {value}: only {self.value} is supported"


@dataclass(frozen=True)
class Off(ConfigEntries):
    """An entry that must be false, null or missing.

    Attributes:
        key: Key in `config.json`.
    """

    key: str

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if the entry is on."""
        value = hf.get(self.key)
        if value is not None and value is not False:
            yield f"{self.key}: {value!r}: is not supported"


@dataclass(frozen=True)
class Written(ConfigEntries):
    """An entry that exports hold and imports do not read."""

    key: str
    value: Any

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry."""
        return {self.key: self.value}


def is_whole_number(value: Any) -> bool:
    """Return whether a JSON value is a whole number. True and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a number. True and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def query_heads(known: Fields) -> int:
    """Return the number of query heads, for families that have a key head for each."""
    heads: int = known["num_attention_heads"]
    return heads


def hidden_per_head(known: Fields) -> int:
    """Return the width of heads that are together as wide as the hidden states."""
    hidden: int = known["hidden_size"]
    return hidden // query_heads(known)


def four_times_hidden(known: Fields) -> int:
    """Return the usual width of an MLP."""
    hidden: int = known["hidden_size"]
    return 4 * hidden


def all_global(known: Fields) -> tuple[str, ...]:
    """Return the attention of blocks that all see the whole context."""
    layers: int = known["num_layers"]
    return ("global",) * layers


EQUAL_HEADS: tuple[ConfigEntries, ...] = (
    Derived("num_kv_heads", query_heads),
    Derived("head_dim", hidden_per_head),
)
"""Heads of families without entries for them: a key head for each query head, together as wide as the hidden states."""
ALL_GLOBAL = Derived("attention", all_global)
"""Attention of families without entries for it."""
ATTENTION_BIASES_EQUAL = Derived("attention_output_bias", lambda known: known["qkv_bias"])
"""Follows the entry of `qkv_bias` in families with one entry for both."""
