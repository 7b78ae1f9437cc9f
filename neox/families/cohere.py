"""Command-R (`CohereForCausalLM`), and Command R7B and Command A (`Cohere2ForCausalLM`).

Source: transformers, models/cohere and cohere2. One LayerNorm without bias for attention and MLP, logits with a factor,
and rotary positions that turn neighbouring dimensions. Cohere 2 has a window in three of four blocks, and rotates
nothing in the others. Norms of queries and keys (`use_qk_norm`, Command-R+) are not supported: they have a LayerNorm
for each head.
"""

from __future__ import annotations

from neox.families.config_entries import (
    ALL_GLOBAL,
    ATTENTION_BIASES_EQUAL,
    ConfigEntries,
    Derived,
    Dropout,
    Factor,
    Fields,
    Number,
    Off,
    Size,
    Switch,
    hidden_per_head,
    query_heads,
)
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, llama_tensors
from neox.families.shared_entries import GATED_ACTIVATIONS, Activation, Rotary, WindowPattern, ending_entries

_NETWORK: Fields = {"norm": "layernorm_no_bias", "residual": "parallel_one_norm", "mlp_bias": False}


def _blocks_without_window(known: Fields) -> tuple[int, ...]:
    kinds: tuple[str, ...] = known["attention"]
    return tuple(block for block, kind in enumerate(kinds) if kind == "global")


_SIZES: tuple[ConfigEntries, ...] = (
    Size("num_hidden_layers", "num_layers", 40),
    Size("hidden_size", "hidden_size", 8192),
    Size("num_attention_heads", "num_attention_heads", 64),
    Size("num_key_value_heads", "num_kv_heads", query_heads, null=query_heads),
    Derived("head_dim", hidden_per_head),
    Size("intermediate_size", "mlp_width", 22528),
    Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
    Size("max_position_embeddings", "max_positions", 8192),
    Switch("tie_word_embeddings", "tie_word_embeddings", default=True),
    Number("layer_norm_eps", "norm_epsilon", 1e-5),
    Switch("attention_bias", "qkv_bias", default=False),
    ATTENTION_BIASES_EQUAL,
    Off("use_qk_norm"),
    Factor("logit_scale", "logit_multiplier", 0.0625),
    Dropout("attention_dropout", "attention_dropout"),
)

COHERE = Family(
    model_type="cohere",
    class_name="CohereForCausalLM",
    title="Command-R",
    fixed_fields=_NETWORK,
    config=(*_SIZES, ALL_GLOBAL, Rotary(default_base=500000.0), *ending_entries(256000)),
    tensors=llama_tensors(interleaved=True),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)

COHERE2 = Family(
    model_type="cohere2",
    class_name="Cohere2ForCausalLM",
    title="Command R7B",
    fixed_fields=_NETWORK,
    config=(
        *_SIZES,
        WindowPattern(every=4),
        Derived("unrotated_blocks", _blocks_without_window),
        Rotary(),
        *ending_entries(256000),
    ),
    tensors=llama_tensors(interleaved=True),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
