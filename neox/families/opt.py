"""OPT (`OPTForCausalLM`): GPT-2's form with ReLU, and two rows before position 0 in the table of positions.

Source: transformers, models/opt. The 350M model is not supported: it normalises after its residuals, and its embedding
is narrower than its hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from neox.architecture import Architecture
from neox.families.config_entries import (
    ALL_GLOBAL,
    ATTENTION_BIASES_EQUAL,
    EQUAL_HEADS,
    Choice,
    ConfigEntries,
    Derived,
    Dropout,
    Fields,
    Fixed,
    ModelSettings,
    Size,
    Switch,
    Written,
)
from neox.families.family import Family, TensorSource, same_tensors, separate_projections
from neox.families.shared_entries import PLAIN_ACTIVATIONS, Activation, ending_entries

_BLOCK = "model.decoder.layers.{i}."
_OFFSET = 2


@dataclass(frozen=True)
class _Positions(Size):
    """Number of positions. The table of positions has rows before them."""

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the number of rows of the table."""
        return {self.field: super().read(hf, known)[self.field] + _OFFSET}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry."""
        return {self.key: max(1, network.max_positions - _OFFSET)}


class _EmbeddingWidth(ConfigEntries):
    """Width of the embedding, which must be that of the hidden states."""

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if it is another one."""
        width = hf.get("word_embed_proj_dim")
        hidden = hf.get("hidden_size", 768)
        if width not in (None, hidden):
            yield f"word_embed_proj_dim: {width}: only hidden_size: {hidden} is supported"

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry."""
        return {"word_embed_proj_dim": network.hidden_size}


OPT = Family(
    model_type="opt",
    class_name="OPTForCausalLM",
    score_class="OPTForSequenceClassification",
    title="OPT",
    fixed_fields={
        "residual": "sequential",
        "norm_epsilon": 1e-5,
        "positions": "learned",
        "learned_offset": _OFFSET,
        "rotary_ndims": 0,
        "rotary_base": 0.0,
    },
    config=(
        Size("num_hidden_layers", "num_layers", 12),
        Size("hidden_size", "hidden_size", 768),
        _EmbeddingWidth(),
        Size("num_attention_heads", "num_attention_heads", 12),
        *EQUAL_HEADS,
        ALL_GLOBAL,
        Size("ffn_dim", "mlp_width", 3072),
        Activation("activation_function", PLAIN_ACTIVATIONS, "relu"),
        _Positions("max_position_embeddings", "max_positions", 2048),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=True),
        Switch("enable_bias", "qkv_bias", default=True),
        ATTENTION_BIASES_EQUAL,
        Derived("mlp_bias", lambda known: known["qkv_bias"]),
        Choice(
            "layer_norm_elementwise_affine",
            "norm",
            True,
            values={False: "non_parametric_layernorm", True: "layernorm"},
        ),
        Fixed("do_layer_norm_before", True),
        Fixed("_remove_final_layer_norm", False),
        Fixed("layerdrop", 0.0),
        Dropout("attention_dropout", "attention_dropout"),
        Dropout("dropout", "hidden_dropout", 0.1),
        # its default in transformers, 1, would keep the embedding of that token from being trained there
        Written("pad_token_id", None),
        *ending_entries(50272, deviation_key="init_std"),
    ),
    tensors={
        "embedding": {
            "word_embeddings": TensorSource(("model.decoder.embed_tokens",)),
            "position_embeddings": TensorSource(("model.decoder.embed_positions",)),
        },
        "block": {
            "attention.query_key_value": separate_projections(f"{_BLOCK}self_attn."),
            **same_tensors(
                _BLOCK,
                {
                    "input_layernorm": "self_attn_layer_norm",
                    "attention.dense": "self_attn.out_proj",
                    "post_attention_layernorm": "final_layer_norm",
                    "mlp.dense_h_to_4h": "fc1",
                    "mlp.dense_4h_to_h": "fc2",
                },
            ),
        },
        "norm": {"norm": TensorSource(("model.decoder.final_layer_norm",))},
        "head": {"final_linear": TensorSource(("lm_head",))},
    },
    base_prefix="model.",
)
