"""Mamba (`MambaForCausalLM`): blocks of norm and mixer, without attention and MLP.

Source: transformers, models/mamba.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from neox.architecture import Architecture
from neox.families.config_entries import (
    ConfigEntries,
    Derived,
    Fields,
    Fixed,
    Number,
    Off,
    Size,
    Switch,
    Written,
    is_number,
    is_whole_number,
)
from neox.families.family import Family
from neox.families.mamba2 import MIXER_WITHOUT_ADAPTERS, RECURRENT_NETWORK, RECURRENT_UNSTORED, backbone_tensors
from neox.families.shared_entries import ending_entries


@dataclass(frozen=True)
class Widths(ConfigEntries):
    """`expand`, the channels as a multiple of the hidden size, and `time_step_rank`, which may be `auto`.

    transformers computes `intermediate_size` from the first one, and writes it next to it.
    """

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason for each entry of a wrong type."""
        expand = hf.get("expand", 2)
        if not is_number(expand) or expand <= 0:
            yield f"expand: {expand!r}: should be a number above 0"
        rank = hf.get("time_step_rank", "auto")
        if rank != "auto" and not (is_whole_number(rank) and rank >= 1):
            yield f"time_step_rank: {rank!r}: should be auto or a whole number of at least 1"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return both widths."""
        hidden = known["hidden_size"]
        rank = hf.get("time_step_rank", "auto")
        if rank == "auto":
            rank = -(-hidden // 16)
        return {"mamba_width": int(hf.get("expand", 2) * hidden), "mamba_dt_rank": rank}

    def write(self, network: Architecture, settings: Any) -> Mapping[str, Any]:
        """Return both entries; the multiple is a whole number, if it can be."""
        expand: float = network.mamba_width / network.hidden_size
        if expand.is_integer():
            expand = int(expand)
        return {"expand": expand, "intermediate_size": network.mamba_width, "time_step_rank": network.mamba_dt_rank}


MAMBA = Family(
    model_type="mamba",
    class_name="MambaForCausalLM",
    title="Mamba",
    without_adapters={**MIXER_WITHOUT_ADAPTERS, "dt_proj": "transformers multiplies with its weight alone"},
    fixed_fields=RECURRENT_NETWORK,
    unstored_fields=RECURRENT_UNSTORED,
    config=(
        Size("num_hidden_layers", "num_layers", 32),
        Size("hidden_size", "hidden_size", 768),
        Derived("attention", lambda known: ("mamba",) * known["num_layers"]),
        Widths(),
        Size("state_size", "mamba_state", 16),
        Size("conv_kernel", "mamba_conv", 4),
        Switch("use_conv_bias", "mamba_conv_bias", True),
        # with it, theirs lacks the bias of B, C and the steps, which gpt-neox adds
        Off("use_bias"),
        Derived("mamba_linear_bias", lambda known: False),
        Number("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=True),
        Fixed("hidden_act", "silu"),
        Written("pad_token_id", None),
        *ending_entries(vocab_size=50280),
    ),
    tensors=backbone_tensors("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj"),
    base_prefix="backbone.",
    key_aliases={"backbone.embedding.weight": "backbone.embeddings.weight"},
)
