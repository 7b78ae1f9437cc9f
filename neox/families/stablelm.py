"""StableLM (`StableLmForCausalLM`): Llama with LayerNorm and partly rotated heads; parallel residuals in some models.

Source: transformers, models/stablelm. Norms of queries and keys (`qk_layernorm`, StableLM 2 12B) are not supported:
they have a LayerNorm without bias for each head.
"""

from __future__ import annotations

from neox.families.config_entries import (
    ALL_GLOBAL,
    Choice,
    Derived,
    Dropout,
    Fixed,
    Number,
    Size,
    Switch,
    hidden_per_head,
    query_heads,
)
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, llama_tensors
from neox.families.shared_entries import GATED_ACTIVATIONS, Activation, Rotary, ending_entries

STABLELM = Family(
    model_type="stablelm",
    class_name="StableLmForCausalLM",
    score_class="StableLmForSequenceClassification",
    title="StableLM",
    fixed_fields={"norm": "layernorm", "attention_output_bias": False, "mlp_bias": False},
    config=(
        Size("num_hidden_layers", "num_layers", 32),
        Size("hidden_size", "hidden_size", 2560),
        Size("num_attention_heads", "num_attention_heads", 32),
        Size("num_key_value_heads", "num_kv_heads", 32, null=query_heads),
        Derived("head_dim", hidden_per_head),
        ALL_GLOBAL,
        Size("intermediate_size", "mlp_width", 6912),
        Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
        Size("max_position_embeddings", "max_positions", 4096),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=False),
        Number("layer_norm_eps", "norm_epsilon", 1e-5),
        Switch("use_qkv_bias", "qkv_bias", default=False),
        Fixed("qk_layernorm", False),
        Choice("use_parallel_residual", "residual", False, values={True: "parallel_one_norm", False: "sequential"}),
        Rotary(fraction_key="partial_rotary_factor", default_fraction=0.25),
        Dropout("attention_dropout", "attention_dropout"),
        Dropout("hidden_dropout", "hidden_dropout"),
        *ending_entries(50304),
    ),
    tensors=llama_tensors(),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
