"""Mamba-2 (`Mamba2ForCausalLM`): blocks of norm and mixer, without attention and MLP.

Source: transformers, models/mamba2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Any

from neox.architecture import WITHOUT_ATTENTION, WITHOUT_MLP, Architecture, LayerKind
from neox.families.config_entries import (
    ConfigEntries,
    Derived,
    Fields,
    Fixed,
    Number,
    Size,
    Switch,
    Written,
    is_whole_number,
)
from neox.families.family import Family, TensorSource, same_tensors
from neox.families.shared_entries import ending_entries

_BLOCK = "backbone.layers.{i}."
RECURRENT_NETWORK: Fields = MappingProxyType(
    {
        **WITHOUT_ATTENTION,
        **WITHOUT_MLP,
        "norm": "rmsnorm",
        "positions": "none",
        "max_positions": 2048,
    }
)
"""Fields of networks of Mamba's blocks."""
RECURRENT_UNSTORED = ("max_positions",)
"""Fields of these networks without an entry in `config.json`: nothing in them depends on the longest sequence."""


def backbone_tensors(*modules: str) -> dict[LayerKind, Mapping[str, TensorSource]]:
    """Return the sources of the tensors of blocks that are a norm and a mixer.

    Args:
        *modules: Modules of the mixer, which have the same names on both sides.
    """
    names = ["norm", "mixer", *(f"mixer.{module}" for module in modules)]
    return {
        "embedding": {"word_embeddings": TensorSource(("backbone.embeddings",))},
        "block": same_tensors(_BLOCK, {name: name for name in names}),
        "norm": {"norm": TensorSource(("backbone.norm_f",))},
        "head": {"final_linear": TensorSource(("lm_head",))},
    }


@dataclass(frozen=True)
class Expansion(ConfigEntries):
    """`expand`, the channels of a mixer as a multiple of the hidden size. They follow from the heads.

    Attributes:
        key: Key in `config.json`.
        heads: Key of the number of heads.
        head_dim: Key of the channels of a head.
    """

    key: str
    heads: str
    head_dim: str

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if the entry says something else than the heads."""
        sizes = [hf.get(key) for key in (self.key, "hidden_size", self.heads, self.head_dim)]
        if not all(is_whole_number(size) for size in sizes):
            return
        expand, hidden, heads, width = (int(size or 0) for size in sizes)
        if expand * hidden != heads * width:
            product = f"{self.heads} x {self.head_dim} is {heads * width}"
            yield f"{self.key}: {expand}: {product}, not {expand} x hidden_size, {expand * hidden}"

    def write(self, network: Architecture, settings: Any) -> Mapping[str, Any]:
        """Return the multiple: a whole number, if it is one."""
        channels = network.mamba_heads * network.mamba_head_dim
        if channels % network.hidden_size == 0:
            return {self.key: channels // network.hidden_size}
        return {self.key: channels / network.hidden_size}


@dataclass(frozen=True)
class NoStepLimit(ConfigEntries):
    """`time_step_limit`, the bounds of dt, which must be those of any dt: 0 and infinity.

    JSON has no infinity: transformers writes it as a dictionary, and earlier as a name that Python alone reads.
    """

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if there are other bounds."""
        given = hf.get("time_step_limit")
        bounds = list(given) if isinstance(given, list | tuple) else given
        if bounds in (None, [0, inf], [0, {"__float__": "Infinity"}]):
            return
        yield f"time_step_limit: {given}: only [0.0, inf] is supported"


MIXER_WITHOUT_ADAPTERS: Mapping[str, str] = MappingProxyType(
    {"out_proj": "peft refuses it, because kernels read its weight alone"}
)
"""Linear layers of Mamba's and Mamba-2's mixers that `peft` gives no adapters."""

MAMBA2 = Family(
    model_type="mamba2",
    class_name="Mamba2ForCausalLM",
    title="Mamba-2",
    without_adapters=MIXER_WITHOUT_ADAPTERS,
    fixed_fields=RECURRENT_NETWORK,
    unstored_fields=RECURRENT_UNSTORED,
    config=(
        Size("num_hidden_layers", "num_layers", 64),
        Size("hidden_size", "hidden_size", 4096),
        Derived("attention", lambda known: ("mamba2",) * known["num_layers"]),
        Size("num_heads", "mamba_heads", 128),
        Size("head_dim", "mamba_head_dim", 64),
        Expansion("expand", "num_heads", "head_dim"),
        Size("n_groups", "mamba_groups", 8),
        Size("state_size", "mamba_state", 128),
        Size("conv_kernel", "mamba_conv", 4),
        Switch("use_conv_bias", "mamba_conv_bias", True),
        Switch("use_bias", "mamba_linear_bias", False),
        Number("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=False),
        Fixed("hidden_act", "silu"),
        NoStepLimit(),
        Written("pad_token_id", None),
        *ending_entries(),
    ),
    tensors=backbone_tensors("in_proj", "conv1d", "norm", "out_proj"),
    base_prefix="backbone.",
    key_aliases={"backbone.embedding.weight": "backbone.embeddings.weight"},
)
