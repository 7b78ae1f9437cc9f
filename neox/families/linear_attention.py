"""Entries of `config.json` and names of tensors that families with gated linear attention have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from neox.architecture import Architecture
from neox.families.config_entries import ConfigEntries, Fields, ModelSettings, Rule, Size
from neox.families.family import TensorSource, same_tensors
from neox.families.shared_entries import Activation

LINEAR: Final = "linear_attention"
FULL: Final = "full_attention"
MULTI_TOKEN = ("mtp.",)
"""Beginning of the keys of multi-token prediction in published models, which transformers ignores."""
_MIXER = "model.layers.{i}.linear_attn"


@dataclass(frozen=True)
class LinearAndFull(ConfigEntries):
    """`layer_types`: the kind of each block. Without it, every fourth block has full attention.

    Attributes:
        interval_key: Key of another distance of these blocks, in files without `layer_types`; empty for none.
        needs_both: Whether transformers refuses a network with blocks of one kind. The last block has full attention
            then, if no entry says so of another one.
    """

    interval_key: str = ""
    needs_both: bool = False

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if the list has other kinds, or another length than there are blocks."""
        types = hf.get("layer_types")
        if types is None:
            if self.interval_key:
                yield from Size(self.interval_key, "interval", 4).problems(hf)
            return
        if not isinstance(types, list) or any(kind not in (LINEAR, FULL) for kind in types):
            yield f"layer_types: {types!r}: should be a list of {LINEAR} and {FULL}"
        elif len(types) != hf.get("num_hidden_layers"):
            yield f"layer_types: has {len(types)} entries for num_hidden_layers: {hf.get('num_hidden_layers')}"
        elif self.needs_both and len(set(types)) < 2:
            yield f"layer_types: {types!r}: should have blocks of both kinds"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the kinds of all blocks."""
        types = hf.get("layer_types")
        if types is None:
            interval = hf.get(self.interval_key, 4)
            types = [LINEAR if (block + 1) % interval else FULL for block in range(known["num_layers"])]
            if self.needs_both and FULL not in types:
                types[-1] = FULL
        return {"attention": tuple("gated_delta" if kind == LINEAR else "global" for kind in types)}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the list. If there must be blocks of both kinds, and there are not, the first one is written so."""
        types = [LINEAR if kind == "gated_delta" else FULL for kind in network.attention]
        if self.needs_both and len(set(types)) < 2:
            types[0] = FULL if types[0] == LINEAR else LINEAR
        return {"layer_types": types}


class LinearSize(Size):
    """A size of linear attention: 0 in a network without it."""

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the size."""
        return of_linear_blocks(known, super().read(hf, known))

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry. It is 1 for a network without linear attention."""
        return {self.key: max(1, getattr(network, self.field))}


def of_linear_blocks(known: Fields, fields: Fields) -> Fields:
    """Return fields of linear attention, without values if no block has it.

    Args:
        known: Fields that earlier entries have read.
        fields: The fields.
    """
    if "gated_delta" in known["attention"]:
        return fields
    return {name: type(value)() for name, value in fields.items()}


def linear_entries(
    *, key_heads: int | Rule, value_heads: int | Rule, key_dim: int | Rule, value_dim: int | Rule
) -> tuple[ConfigEntries, ...]:
    """Return the entries of linear attention's sizes.

    Args:
        key_heads: Value of a missing number of heads of queries and keys, or a rule for it.
        value_heads: The same of values.
        key_dim: The same of the width of a key.
        value_dim: The same of the width of a value.
    """
    return (
        _size("linear_num_key_heads", "linear_key_heads", key_heads),
        LinearHeads("linear_num_value_heads", "linear_value_heads", value_heads, null=value_heads),
        _size("linear_key_head_dim", "linear_key_dim", key_dim),
        _size("linear_value_head_dim", "linear_value_dim", value_dim),
        LinearSize("linear_conv_kernel_dim", "linear_conv", 4),
    )


def _size(key: str, field: str, default: int | Rule) -> LinearSize:
    return LinearSize(key, field, default, null=default)


class LinearHeads(LinearSize):
    """The number of value heads, a multiple of that of key heads."""

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if it is wrong, or no multiple."""
        yield from super().problems(hf)
        values, keys = hf.get(self.key), hf.get("linear_num_key_heads")
        if isinstance(values, int) and isinstance(keys, int) and keys > 0 and values % keys:
            yield f"{self.key}: {values}: should be a multiple of linear_num_key_heads: {keys}"


def with_silu(entries: Iterable[ConfigEntries]) -> tuple[ConfigEntries, ...]:
    """Return entries of which that of the activation takes silu only.

    transformers applies it to linear attention's convolution, too, where ours is always silu.
    """
    result: list[ConfigEntries] = []
    for entry in entries:
        if isinstance(entry, Activation):
            entry = Activation(entry.key, {"swiglu": "silu"}, "silu")
        result.append(entry)
    return tuple(result)


def delta_tensors(
    *, projection: TensorSource, convolution: TensorSource, norm: str, output: str
) -> dict[str, TensorSource]:
    """Return the sources of the modules of linear attention.

    Args:
        projection: Of queries, keys, values, gates, strengths and decays.
        convolution: Of the convolution.
        norm: Name of the norm of heads, inside linear attention.
        output: Name of the output projection there.
    """
    names = {"mixer": "", "mixer.norm": f".{norm}", "mixer.out_proj": f".{output}"}
    return {
        **same_tensors(_MIXER, names),
        "mixer.in_proj": projection,
        "mixer.conv1d": convolution,
    }


def linear_modules(*names: str) -> tuple[str, ...]:
    """Return the full names of modules of linear attention."""
    return tuple(f"{_MIXER}.{name}" for name in names)
