"""OLMoE (`OlmoeForCausalLM`): Llama with norms of all queries and all keys, and experts in every block.

Source: transformers, models/olmoe.
"""

from __future__ import annotations

from neox.families.config_entries import ALL_GLOBAL, ATTENTION_BIASES_EQUAL, Fixed, Switch, Written
from neox.families.expert_entries import (
    QWEN_EXPERTS,
    SOFTMAX_EXPERTS,
    ExpertSize,
    SeveralExperts,
    with_equal_heads,
    with_experts_instead_of_mlps,
)
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, llama_entries, llama_tensors
from neox.families.shared_entries import ending_entries

_TENSORS = llama_tensors({"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"})

OLMOE = Family(
    model_type="olmoe",
    class_name="OlmoeForCausalLM",
    title="OLMoE",
    fixed_fields={**NETWORK, **SOFTMAX_EXPERTS, "qk_norm": "full"},
    config=(
        *with_equal_heads(with_experts_instead_of_mlps(llama_entries(max_positions=4096, norm_epsilon=1e-5))),
        ALL_GLOBAL,
        Switch("attention_bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        Fixed("clip_qkv", None),
        SeveralExperts("num_experts", "num_experts", 64),
        ExpertSize("num_experts_per_tok", "experts_per_token", 8),
        Switch("norm_topk_prob", "router_normalizes", default=False),
        # its default in transformers, 1, would keep the embedding of that token from being trained there
        Written("pad_token_id", None),
        *ending_entries(),
    ),
    tensors={**_TENSORS, "block": {**_TENSORS["block"], **QWEN_EXPERTS}},
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
