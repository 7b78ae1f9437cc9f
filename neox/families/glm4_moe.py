"""GLM-4.5 (`Glm4MoeForCausalLM`): DeepSeek-V3's experts with grouped-query attention and partial rotary embeddings.

Source: transformers, models/glm4_moe; arXiv:2508.06471.
"""

from __future__ import annotations

from neox.families.config_entries import ALL_GLOBAL, Choice, Factor, Switch
from neox.families.deepseek import (
    EXPERT_TENSORS,
    FURTHER_LAYERS,
    MULTI_TOKEN,
    V3_NAMES,
    ExpertGroups,
    FirstDenseBlocks,
    RoutedExperts,
    SharedExperts,
)
from neox.families.expert_entries import ExpertSize
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, NORMS_OF_HEADS, llama_entries, llama_tensors
from neox.families.shared_entries import Rotary, ending_entries

_TENSORS = llama_tensors(NORMS_OF_HEADS)

GLM4_MOE = Family(
    model_type="glm4_moe",
    class_name="Glm4MoeForCausalLM",
    title="GLM-4.5",
    fixed_fields={**NETWORK, "router": "sigmoid", "router_bias": True},
    config=(
        *llama_entries(
            max_positions=131072,
            norm_epsilon=1e-5,
            num_kv_heads=8,
            rotary=Rotary(fraction_key="partial_rotary_factor", default_fraction=0.5),
        ),
        ALL_GLOBAL,
        Switch("attention_bias", "qkv_bias", default=False),
        Choice("use_qk_norm", "qk_norm", False, values={True: "head", False: "none"}),
        RoutedExperts("n_routed_experts", "num_experts", 128),
        ExpertSize("num_experts_per_tok", "experts_per_token", 8),
        ExpertSize("moe_intermediate_size", "expert_width", 1408),
        SharedExperts(1),
        FirstDenseBlocks(1),
        Factor("routed_scaling_factor", "router_scale", 1.0),
        Switch("norm_topk_prob", "router_normalizes", default=True),
        ExpertGroups(1, 1, best=2),
        MULTI_TOKEN,
        *ending_entries(),
    ),
    tensors={**_TENSORS, "block": {**_TENSORS["block"], **EXPERT_TENSORS}},
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
    other_names=V3_NAMES,
    further_layers_key=FURTHER_LAYERS,
)
