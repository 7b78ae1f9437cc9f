"""BLOOM (`BloomForCausalLM`): ALiBi, a norm of the embeddings, and Megatron-LM's order of queries, keys and values.

Source: transformers, models/bloom. ALiBi needs no length. The files of BigScience's models give theirs as `seq_length`.
"""

from __future__ import annotations

from neox.families.config_entries import (
    ALL_GLOBAL,
    EQUAL_HEADS,
    Derived,
    Dropout,
    Fixed,
    Number,
    Size,
    Switch,
    four_times_hidden,
)
from neox.families.family import Family, TensorSource, same_tensors
from neox.families.shared_entries import ending_entries

_BLOCK = "transformer.h.{i}."

BLOOM = Family(
    model_type="bloom",
    class_name="BloomForCausalLM",
    score_class="BloomForSequenceClassification",
    title="BLOOM",
    fixed_fields={
        "norm": "layernorm",
        "residual": "sequential",
        "activation": "gelu_tanh",
        "positions": "alibi",
        "rotary_ndims": 0,
        "rotary_base": 0.0,
        "embedding_norm": True,
    },
    config=(
        Size("n_layer", "num_layers", 2, other_keys=("num_hidden_layers",)),
        Size("hidden_size", "hidden_size", 64, other_keys=("n_embed",)),
        Size("n_head", "num_attention_heads", 8, other_keys=("num_attention_heads",)),
        *EQUAL_HEADS,
        ALL_GLOBAL,
        Derived("mlp_width", four_times_hidden),
        Size("seq_length", "max_positions", 2048),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=True),
        Number("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Fixed("apply_residual_connection_post_layernorm", False),
        Dropout("attention_dropout", "attention_dropout"),
        Dropout("hidden_dropout", "hidden_dropout"),
        *ending_entries(250880),
    ),
    tensors={
        "embedding": same_tensors(
            "transformer.", {"word_embeddings": "word_embeddings", "norm": "word_embeddings_layernorm"}
        ),
        "block": same_tensors(
            _BLOCK,
            {
                "input_layernorm": "input_layernorm",
                "attention.query_key_value": "self_attention.query_key_value",
                "attention.dense": "self_attention.dense",
                "post_attention_layernorm": "post_attention_layernorm",
                "mlp.dense_h_to_4h": "mlp.dense_h_to_4h",
                "mlp.dense_4h_to_h": "mlp.dense_4h_to_h",
            },
        ),
        "norm": {"norm": TensorSource(("transformer.ln_f",))},
        "head": {"final_linear": TensorSource(("lm_head",))},
    },
    base_prefix="transformer.",
)
