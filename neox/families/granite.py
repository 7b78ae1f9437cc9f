"""Granite (`GraniteForCausalLM`): Llama with factors of the embedding, the residuals, the scores and the logits.

Source: transformers, models/granite.
"""

from __future__ import annotations

from neox.families.config_entries import ALL_GLOBAL, ATTENTION_BIASES_EQUAL, Divisor, Factor, ScoreFactor, Switch
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, llama_entries, llama_tensors
from neox.families.shared_entries import ending_entries

GRANITE = Family(
    model_type="granite",
    class_name="GraniteForCausalLM",
    title="Granite",
    fixed_fields=NETWORK,
    config=(
        *llama_entries(),
        ALL_GLOBAL,
        Switch("attention_bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        Switch("mlp_bias", "mlp_bias", default=False),
        Factor("embedding_multiplier", "embedding_multiplier", 1.0),
        Factor("residual_multiplier", "residual_multiplier", 1.0),
        ScoreFactor("attention_multiplier", default=1.0),
        Divisor("logits_scaling", "logit_multiplier", 1.0),
        *ending_entries(),
    ),
    tensors=llama_tensors(),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
