"""GLM-4: 9B of June 2024 (`GlmForCausalLM`), and GLM-4-0414 and GLM-Z1 (`Glm4ForCausalLM`).

Source: transformers, models/glm and glm4. Half of each head is rotated, in neighbouring dimensions; queries, keys and
values have biases; the gate comes first in one projection. The later models have norms of the results, too.
"""

from __future__ import annotations

from neox.families.config_entries import ALL_GLOBAL, ConfigEntries, Switch, Written
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, llama_entries, llama_tensors
from neox.families.shared_entries import Rotary, ending_entries


def _config(max_positions: int) -> tuple[ConfigEntries, ...]:
    """Return the entries of `config.json`, which both have."""
    return (
        *llama_entries(
            max_positions=max_positions,
            norm_epsilon=0.00000015625,
            num_kv_heads=2,
            head_dim=128,
            rotary=Rotary(fraction_key="partial_rotary_factor", default_fraction=0.5),
        ),
        ALL_GLOBAL,
        Switch("attention_bias", "qkv_bias", default=True),
        # its default in transformers, 151329, would keep the embedding of that token from being trained there
        Written("pad_token_id", None),
        *ending_entries(),
    )


GLM = Family(
    model_type="glm",
    class_name="GlmForCausalLM",
    score_class="GlmForSequenceClassification",
    title="GLM-4",
    fixed_fields=NETWORK,
    config=_config(131072),
    tensors=llama_tensors(interleaved=True, fused_gate=True),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)

GLM4 = Family(
    model_type="glm4",
    class_name="Glm4ForCausalLM",
    score_class="Glm4ForSequenceClassification",
    title="GLM-4-0414",
    fixed_fields={**NETWORK, "residual": "sandwich"},
    config=_config(131072),
    tensors=llama_tensors(
        {
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        interleaved=True,
        fused_gate=True,
    ),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
