"""OLMo 3 (`Olmo3ForCausalLM`): OLMo-2 with a window in three of four blocks, whose rotary positions are not scaled.

Source: transformers, models/olmo3.
"""

from __future__ import annotations

from neox.families.config_entries import (
    ATTENTION_BIASES_EQUAL,
    Derived,
    Dropout,
    Number,
    Size,
    Switch,
    Written,
    hidden_per_head,
    query_heads,
)
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS
from neox.families.olmo2 import OLMO2
from neox.families.shared_entries import GATED_ACTIVATIONS, Activation, TwoRotaries, WindowPattern, ending_entries

OLMO3 = Family(
    model_type="olmo3",
    class_name="Olmo3ForCausalLM",
    score_class="Olmo3ForSequenceClassification",
    title="OLMo 3",
    fixed_fields=OLMO2.fixed_fields,
    config=(
        Size("num_hidden_layers", "num_layers", 32),
        Size("hidden_size", "hidden_size", 4096),
        Size("num_attention_heads", "num_attention_heads", 32),
        Size("num_key_value_heads", "num_kv_heads", query_heads, null=query_heads),
        Derived("head_dim", hidden_per_head),
        Size("intermediate_size", "mlp_width", 11008),
        Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
        Size("max_position_embeddings", "max_positions", 2048),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=False),
        Number("rms_norm_eps", "norm_epsilon", 1e-5),
        WindowPattern(every=4),
        TwoRotaries(default_base=500000.0),
        Dropout("attention_dropout", "attention_dropout"),
        Switch("attention_bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        # its default in transformers, 1, would keep the embedding of that token from being trained there
        Written("pad_token_id", None),
        *ending_entries(50304),
    ),
    tensors=OLMO2.tensors,
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
