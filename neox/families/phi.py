"""Phi (`PhiForCausalLM`): Phi-1, Phi-1.5, Phi-2. Attention and MLP read one norm; all products have biases.

Source: transformers, models/phi.
"""

from __future__ import annotations

from neox.families.config_entries import (
    ALL_GLOBAL,
    Derived,
    Dropout,
    Fixed,
    Number,
    Size,
    Switch,
    UnreadDropout,
    hidden_per_head,
    query_heads,
)
from neox.families.family import Family, TensorSource, same_tensors, separate_projections
from neox.families.shared_entries import PLAIN_ACTIVATIONS, Activation, Rotary, ending_entries

_BLOCK = "model.layers.{i}."

PHI = Family(
    model_type="phi",
    class_name="PhiForCausalLM",
    score_class="PhiForSequenceClassification",
    title="Phi",
    fixed_fields={"norm": "layernorm", "residual": "parallel_one_norm", "head_bias": True},
    config=(
        Size("num_hidden_layers", "num_layers", 24),
        Size("hidden_size", "hidden_size", 2048),
        Size("num_attention_heads", "num_attention_heads", 32),
        Size("num_key_value_heads", "num_kv_heads", query_heads, null=query_heads),
        Derived("head_dim", hidden_per_head),
        ALL_GLOBAL,
        Size("intermediate_size", "mlp_width", 8192),
        Activation("hidden_act", PLAIN_ACTIVATIONS, "gelu_new"),
        Size("max_position_embeddings", "max_positions", 2048),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=False),
        Number("layer_norm_eps", "norm_epsilon", 1e-5),
        Rotary(fraction_key="partial_rotary_factor", default_fraction=0.5),
        Fixed("qk_layernorm", False),
        Dropout("attention_dropout", "attention_dropout"),
        Dropout("resid_pdrop", "hidden_dropout"),
        UnreadDropout("embd_pdrop", "hidden_dropout"),
        *ending_entries(51200),
    ),
    tensors={
        "embedding": {"word_embeddings": TensorSource(("model.embed_tokens",))},
        "block": {
            "attention.query_key_value": separate_projections(f"{_BLOCK}self_attn."),
            **same_tensors(
                _BLOCK,
                {
                    "input_layernorm": "input_layernorm",
                    "attention.dense": "self_attn.dense",
                    "mlp.dense_h_to_4h": "mlp.fc1",
                    "mlp.dense_4h_to_h": "mlp.fc2",
                },
            ),
        },
        "norm": {"norm": TensorSource(("model.final_layernorm",))},
        "head": {"final_linear": TensorSource(("lm_head",))},
    },
    base_prefix="model.",
    buffers=(".rotary_emb.inv_freq",),
)
