"""Phi-3 and Phi-4 (`Phi3ForCausalLM`): Llama with fused projections, and partly rotated heads in Phi-4-mini.

Source: transformers, models/phi3. The models of 128k tokens are not supported: frequencies of `longrope` depend on the
length of each sequence.
"""

from __future__ import annotations

from neox.families.entries import (
    Derived,
    Dropout,
    Number,
    Size,
    Switch,
    UnreadDropout,
    Written,
    hidden_per_head,
    query_heads,
)
from neox.families.family import Family, TensorSource, same_tensors
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK
from neox.families.shared_entries import (
    GATED_ACTIVATIONS,
    Activation,
    Rotary,
    WindowInAllBlocks,
    ending_entries,
)

_BLOCK = "model.layers.{i}."

PHI3 = Family(
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    title="Phi-3",
    network=NETWORK,
    config=(
        Size("num_hidden_layers", "num_layers", 32),
        Size("hidden_size", "hidden_size", 3072),
        Size("num_attention_heads", "num_attention_heads", 32),
        Size("num_key_value_heads", "num_kv_heads", query_heads, null=query_heads),
        Derived("head_dim", hidden_per_head),
        Size("intermediate_size", "mlp_width", 8192),
        Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
        Size("max_position_embeddings", "max_positions", 4096),
        Switch("tie_word_embeddings", "tie_word_embeddings", False),
        Number("rms_norm_eps", "norm_epsilon", 1e-5),
        Rotary(fraction_key="partial_rotary_factor", takes_scaling=False),
        WindowInAllBlocks(default=None),
        Dropout("attention_dropout", "attention_dropout"),
        Dropout("resid_pdrop", "hidden_dropout"),
        UnreadDropout("embd_pdrop", "hidden_dropout"),
        # its default in transformers, 32000, would keep the embedding of that token from being trained there
        Written("pad_token_id", None),
        *ending_entries(32064),
    ),
    tensors={
        "embedding": {"word_embeddings": TensorSource(("model.embed_tokens",))},
        "block": {
            "attention.query_key_value": TensorSource((f"{_BLOCK}self_attn.qkv_proj",), layout="heads"),
            **same_tensors(
                _BLOCK,
                {
                    "input_layernorm": "input_layernorm",
                    "attention.dense": "self_attn.o_proj",
                    "post_attention_layernorm": "post_attention_layernorm",
                    "mlp.dense_4h_to_h": "mlp.down_proj",
                },
            ),
            "mlp.dense_h_to_4h": TensorSource((f"{_BLOCK}mlp.gate_up_proj",), layout="swapped_halves"),
        },
        "norm": {"norm": TensorSource(("model.norm",))},
        "head": {"final_linear": TensorSource(("lm_head",))},
    },
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
