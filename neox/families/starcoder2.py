"""StarCoder2 (`Starcoder2ForCausalLM`): LayerNorm, biases, an MLP without a gate, few key heads, a sliding window.

Source: transformers, models/starcoder2.
"""

from __future__ import annotations

from neox.families.config_entries import (
    ATTENTION_BIASES_EQUAL,
    Derived,
    Dropout,
    Number,
    Size,
    Switch,
    UnreadDropout,
    hidden_per_head,
    query_heads,
)
from neox.families.family import Family, TensorSource, same_tensors, separate_projections
from neox.families.shared_entries import PLAIN_ACTIVATIONS, Activation, Rotary, WindowInAllBlocks, ending_entries

_BLOCK = "model.layers.{i}."

STARCODER2 = Family(
    model_type="starcoder2",
    class_name="Starcoder2ForCausalLM",
    score_class="Starcoder2ForSequenceClassification",
    title="StarCoder2",
    fixed_fields={"norm": "layernorm", "residual": "sequential"},
    config=(
        Size("num_hidden_layers", "num_layers", 30),
        Size("hidden_size", "hidden_size", 3072),
        Size("num_attention_heads", "num_attention_heads", 24),
        Size("num_key_value_heads", "num_kv_heads", 2, null=query_heads),
        Derived("head_dim", hidden_per_head),
        Size("intermediate_size", "mlp_width", 12288),
        Activation("hidden_act", PLAIN_ACTIVATIONS, "gelu_pytorch_tanh"),
        Size("max_position_embeddings", "max_positions", 4096),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=True),
        Number("norm_epsilon", "norm_epsilon", 1e-5),
        Switch("use_bias", "qkv_bias", default=True),
        ATTENTION_BIASES_EQUAL,
        Derived("mlp_bias", lambda known: known["qkv_bias"]),
        Rotary(),
        WindowInAllBlocks(default=None),
        Dropout("attention_dropout", "attention_dropout"),
        Dropout("residual_dropout", "hidden_dropout"),
        UnreadDropout("embedding_dropout", "hidden_dropout"),
        *ending_entries(49152),
    ),
    tensors={
        "embedding": {"word_embeddings": TensorSource(("model.embed_tokens",))},
        "block": {
            "attention.query_key_value": separate_projections(f"{_BLOCK}self_attn."),
            **same_tensors(
                _BLOCK,
                {
                    "input_layernorm": "input_layernorm",
                    "attention.dense": "self_attn.o_proj",
                    "post_attention_layernorm": "post_attention_layernorm",
                    "mlp.dense_h_to_4h": "mlp.c_fc",
                    "mlp.dense_4h_to_h": "mlp.c_proj",
                },
            ),
        },
        "norm": {"norm": TensorSource(("model.norm",))},
        "head": {"final_linear": TensorSource(("lm_head",))},
    },
    base_prefix="model.",
    buffers=(".rotary_emb.inv_freq",),
)
