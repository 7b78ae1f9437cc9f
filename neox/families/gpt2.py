"""GPT-2 (`GPT2LMHeadModel`), and the form of Megatron-LM's GPT in transformers.

Source: transformers, models/gpt2. Weights are those of Conv1D: [in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from neox.families.config_entries import (
    ALL_GLOBAL,
    EQUAL_HEADS,
    ConfigEntries,
    Dropout,
    Fixed,
    Number,
    Size,
    Switch,
    UnreadDropout,
    four_times_hidden,
)
from neox.families.family import Family, TensorSource
from neox.families.shared_entries import PLAIN_ACTIVATIONS, Activation, ending_entries

_BLOCK = "transformer.h.{i}."


def gpt2_entries(
    *, num_layers: int, hidden_size: int, heads: int, max_positions: int, tied: bool, dropout: float
) -> tuple[ConfigEntries, ...]:
    """Return the entries with which the `config.json` of GPT-2 and GPT-J begins, with transformers' defaults."""
    return (
        Size("n_layer", "num_layers", num_layers),
        Size("n_embd", "hidden_size", hidden_size),
        Size("n_head", "num_attention_heads", heads),
        *EQUAL_HEADS,
        ALL_GLOBAL,
        Size("n_inner", "mlp_width", four_times_hidden, null=four_times_hidden),
        Activation("activation_function", PLAIN_ACTIVATIONS, "gelu_new"),
        Size("n_positions", "max_positions", max_positions),
        Number("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=tied),
        Dropout("attn_pdrop", "attention_dropout", dropout),
        Dropout("resid_pdrop", "hidden_dropout", dropout),
        UnreadDropout("embd_pdrop", "hidden_dropout", dropout),
    )


GPT2_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
)
"""Further names that transformers reads in the `config.json` of GPT-2 and GPT-J -> their own names."""

GPT2 = Family(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    score_class="GPT2ForSequenceClassification",
    title="GPT-2",
    fixed_fields={
        "norm": "layernorm",
        "residual": "sequential",
        "positions": "learned",
        "rotary_ndims": 0,
        "rotary_base": 0.0,
    },
    config=(
        *gpt2_entries(num_layers=12, hidden_size=768, heads=12, max_positions=1024, tied=True, dropout=0.1),
        Fixed("scale_attn_weights", True),
        Fixed("scale_attn_by_inverse_layer_idx", False),
        Fixed("add_cross_attention", False),
        *ending_entries(vocab_size=50257),
    ),
    tensors={
        "embedding": {
            "word_embeddings": TensorSource(("transformer.wte",)),
            "position_embeddings": TensorSource(("transformer.wpe",)),
        },
        "block": {
            "input_layernorm": TensorSource((f"{_BLOCK}ln_1",)),
            "attention.query_key_value": TensorSource((f"{_BLOCK}attn.c_attn",), transpose=True, layout="heads"),
            "attention.dense": TensorSource((f"{_BLOCK}attn.c_proj",), transpose=True),
            "post_attention_layernorm": TensorSource((f"{_BLOCK}ln_2",)),
            "mlp.dense_h_to_4h": TensorSource((f"{_BLOCK}mlp.c_fc",), transpose=True),
            "mlp.dense_4h_to_h": TensorSource((f"{_BLOCK}mlp.c_proj",), transpose=True),
        },
        "norm": {"norm": TensorSource(("transformer.ln_f",))},
        "head": {"final_linear": TensorSource(("lm_head",))},
    },
    base_prefix="transformer.",
    other_names=GPT2_NAMES,
    buffers=(".attn.bias", ".attn.masked_bias"),
)
