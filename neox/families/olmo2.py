"""OLMo-2 (`Olmo2ForCausalLM`): Llama with norms of the results of attention and MLP, and of all queries and all keys.

Source: transformers, models/olmo2.
"""

from __future__ import annotations

from neox.families.config_entries import ALL_GLOBAL, ATTENTION_BIASES_EQUAL, Switch, Written
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, NORMS_OF_HEADS, llama_entries, llama_tensors
from neox.families.shared_entries import ending_entries

OLMO2 = Family(
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    score_class="Olmo2ForSequenceClassification",
    title="OLMo-2",
    fixed_fields={**NETWORK, "residual": "sublayer_output_norm", "qk_norm": "full"},
    config=(
        *llama_entries(norm_epsilon=1e-5),
        ALL_GLOBAL,
        Switch("attention_bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        # its default in transformers, 1, would keep the embedding of that token from being trained there
        Written("pad_token_id", None),
        *ending_entries(),
    ),
    tensors=llama_tensors({**NORMS_OF_HEADS, "post_feedforward_layernorm": "post_feedforward_layernorm"}),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
