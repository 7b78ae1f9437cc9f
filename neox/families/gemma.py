"""Gemma (`GemmaForCausalLM`), Gemma 2 and the text models of Gemma 3 (`Gemma3ForCausalLM`).

Source: transformers, models/gemma, gemma2 and gemma3. The embedding is multiplied by sqrt(hidden size), and norms by
1 + their weight. Gemma 2 has norms before and after attention and MLP, bounds of scores and logits, and a window in
every other block. Gemma 3 has norms of queries and keys in place of the bounds, and a rotary base for blocks with a
window.
"""

from __future__ import annotations

from neox.families.config_entries import (
    ALL_GLOBAL,
    ATTENTION_BIASES_EQUAL,
    Bound,
    ConfigEntries,
    Derived,
    Dropout,
    Fields,
    Number,
    Off,
    ScoreDivisor,
    Size,
    Switch,
    query_heads,
)
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, llama_tensors
from neox.families.shared_entries import (
    GATED_ACTIVATIONS,
    Activation,
    HeadsDivideHidden,
    Rotary,
    TwoRotaries,
    WindowPattern,
    ending_entries,
)

_NORMS_AROUND = {
    "pre_feedforward_layernorm": "pre_feedforward_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
}
_ACTIVATIONS = {"geglu_tanh": "gelu_pytorch_tanh", **GATED_ACTIVATIONS}


def _root_of_hidden(known: Fields) -> float:
    hidden: int = known["hidden_size"]
    return float(hidden**0.5)


def _sizes(
    *, hidden_size: int, mlp_width: int, num_layers: int, heads: int, kv_heads: int
) -> tuple[ConfigEntries, ...]:
    """Return the entries with which a `config.json` begins, with transformers' defaults."""
    return (
        Size("num_hidden_layers", "num_layers", num_layers),
        Size("hidden_size", "hidden_size", hidden_size),
        Derived("embedding_multiplier", _root_of_hidden),
        Size("num_attention_heads", "num_attention_heads", heads),
        Size("num_key_value_heads", "num_kv_heads", kv_heads, null=query_heads),
        Size("head_dim", "head_dim", 256),
        Size("intermediate_size", "mlp_width", mlp_width),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=True),
        Number("rms_norm_eps", "norm_epsilon", 1e-6),
        Switch("attention_bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        Off("use_bidirectional_attention"),
        Dropout("attention_dropout", "attention_dropout"),
    )


GEMMA = Family(
    model_type="gemma",
    class_name="GemmaForCausalLM",
    score_class="GemmaForSequenceClassification",
    title="Gemma",
    fixed_fields={**NETWORK, "norm": "rmsnorm_1p"},
    config=(
        *_sizes(hidden_size=3072, mlp_width=24576, num_layers=28, heads=16, kv_heads=16),
        # the first files say gelu and mean its approximation
        Activation("hidden_act", {"geglu_tanh": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh", {"gelu": "geglu_tanh"}),
        Size("max_position_embeddings", "max_positions", 8192),
        ALL_GLOBAL,
        Rotary(),
        *ending_entries(256000),
    ),
    tensors=llama_tensors(),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)

GEMMA2 = Family(
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    score_class="Gemma2ForSequenceClassification",
    title="Gemma 2",
    fixed_fields={**NETWORK, "norm": "rmsnorm_1p", "residual": "sandwich"},
    config=(
        *_sizes(hidden_size=2304, mlp_width=9216, num_layers=26, heads=8, kv_heads=4),
        HeadsDivideHidden(),
        Derived("embedding_multiplier", _root_of_hidden),
        Activation("hidden_activation", _ACTIVATIONS, "gelu_pytorch_tanh"),
        Size("max_position_embeddings", "max_positions", 8192),
        WindowPattern(every=2),
        Rotary(),
        ScoreDivisor("query_pre_attn_scalar", default=256),
        Bound("attn_logit_softcapping", "attention_softcap", 50.0),
        Bound("final_logit_softcapping", "logit_softcap", 30.0),
        *ending_entries(256000),
    ),
    tensors=llama_tensors(_NORMS_AROUND),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)

GEMMA3 = Family(
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    score_class="Gemma3TextForSequenceClassification",
    title="Gemma 3",
    fixed_fields={**NETWORK, "norm": "rmsnorm_1p", "residual": "sandwich", "qk_norm": "head"},
    config=(
        *_sizes(hidden_size=2304, mlp_width=9216, num_layers=26, heads=8, kv_heads=4),
        HeadsDivideHidden(),
        Derived("embedding_multiplier", _root_of_hidden),
        Activation("hidden_activation", _ACTIVATIONS, "gelu_pytorch_tanh"),
        Size("max_position_embeddings", "max_positions", 131072),
        WindowPattern(every=6),
        TwoRotaries(default_base=1000000.0, local_key="rope_local_base_freq", default_local_base=10000.0),
        ScoreDivisor("query_pre_attn_scalar", default=256),
        # transformers reads it and leaves it out of the computation
        Off("attn_logit_softcapping"),
        Bound("final_logit_softcapping", "logit_softcap", None),
        *ending_entries(262208),
    ),
    tensors=llama_tensors(
        {**_NORMS_AROUND, "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
    ),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
