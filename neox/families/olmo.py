"""OLMo (`OlmoForCausalLM`), the first generation: Llama with LayerNorm that has no parameters.

Source: transformers, models/olmo. Clipped queries, keys and values (`clip_qkv`, some models of 7B) are not supported.
"""

from __future__ import annotations

from neox.families.config_entries import (
    ALL_GLOBAL,
    ATTENTION_BIASES_EQUAL,
    Derived,
    Dropout,
    Fixed,
    Size,
    Switch,
    Written,
    hidden_per_head,
    query_heads,
)
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, llama_tensors
from neox.families.shared_entries import GATED_ACTIVATIONS, Activation, Rotary, ending_entries

OLMO = Family(
    model_type="olmo",
    class_name="OlmoForCausalLM",
    score_class="OlmoForSequenceClassification",
    title="OLMo",
    fixed_fields={
        "norm": "non_parametric_layernorm",
        "norm_epsilon": 1e-5,
        "residual": "sequential",
        "mlp_bias": False,
    },
    config=(
        Size("num_hidden_layers", "num_layers", 32),
        Size("hidden_size", "hidden_size", 4096),
        Size("num_attention_heads", "num_attention_heads", 32),
        Size("num_key_value_heads", "num_kv_heads", query_heads, null=query_heads),
        Derived("head_dim", hidden_per_head),
        ALL_GLOBAL,
        Size("intermediate_size", "mlp_width", 11008),
        Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
        Size("max_position_embeddings", "max_positions", 2048),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=False),
        Switch("attention_bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        Fixed("clip_qkv", None),
        Rotary(),
        Dropout("attention_dropout", "attention_dropout"),
        # its default in transformers, 1, would keep the embedding of that token from being trained there
        Written("pad_token_id", None),
        *ending_entries(50304),
    ),
    tensors=llama_tensors(),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
