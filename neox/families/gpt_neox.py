"""GPT-NeoX (`GPTNeoXForCausalLM`): GPT-NeoX-20B, Pythia.

Source: transformers, models/gpt_neox. Fused query_key_value weights have rows [heads, 3, head_dim] on both sides.
"""

from __future__ import annotations

from neox.families.config_entries import (
    ALL_GLOBAL,
    ATTENTION_BIASES_EQUAL,
    EQUAL_HEADS,
    Choice,
    Dropout,
    Number,
    Size,
    Switch,
)
from neox.families.family import Family, TensorSource, same_tensors
from neox.families.shared_entries import PLAIN_ACTIVATIONS, Activation, Rotary, ending_entries

GPT_NEOX = Family(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    score_class="GPTNeoXForSequenceClassification",
    title="GPT-NeoX",
    fixed_fields={"norm": "layernorm"},
    config=(
        Size("num_hidden_layers", "num_layers", 44),
        Size("hidden_size", "hidden_size", 6144),
        Size("num_attention_heads", "num_attention_heads", 64),
        *EQUAL_HEADS,
        ALL_GLOBAL,
        Size("intermediate_size", "mlp_width", 24576),
        Activation("hidden_act", {**PLAIN_ACTIVATIONS, "gelu_tanh": "gelu_fast"}, "gelu"),
        Size("max_position_embeddings", "max_positions", 2048),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=False),
        Number("layer_norm_eps", "norm_epsilon", 1e-5),
        Choice("use_parallel_residual", "residual", True, values={True: "parallel", False: "sequential"}),
        Switch("attention_bias", "qkv_bias", default=True),
        ATTENTION_BIASES_EQUAL,
        Dropout("attention_dropout", "attention_dropout"),
        Dropout("hidden_dropout", "hidden_dropout"),
        Rotary("rotary_emb_base", "rotary_pct", 0.25),
        *ending_entries(vocab_size=50432),
    ),
    tensors={
        "embedding": {"word_embeddings": TensorSource(("gpt_neox.embed_in",))},
        "block": same_tensors(
            "gpt_neox.layers.{i}.",
            {
                "input_layernorm": "input_layernorm",
                "attention.query_key_value": "attention.query_key_value",
                "attention.dense": "attention.dense",
                "post_attention_layernorm": "post_attention_layernorm",
                "mlp.dense_h_to_4h": "mlp.dense_h_to_4h",
                "mlp.dense_4h_to_h": "mlp.dense_4h_to_h",
            },
        ),
        "norm": {"norm": TensorSource(("gpt_neox.final_layer_norm",))},
        "head": {"final_linear": TensorSource(("embed_out",))},
    },
    base_prefix="gpt_neox.",
    key_aliases={"lm_head.weight": "embed_out.weight"},
    buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
