"""Mixtral (`MixtralForCausalLM`): Mistral with experts in every block, weighted by a softmax over the chosen ones.

Source: transformers, models/mixtral.
"""

from __future__ import annotations

from neox.families.config_entries import Fixed
from neox.families.expert_entries import (
    SOFTMAX_EXPERTS,
    ExpertSize,
    SeveralExperts,
    expert_tensors,
    with_experts_instead_of_mlps,
)
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, llama_entries, llama_tensors
from neox.families.shared_entries import Rotary, WindowInAllBlocks, ending_entries

_TENSORS = llama_tensors()

MIXTRAL = Family(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    score_class="MixtralForSequenceClassification",
    title="Mixtral",
    fixed_fields={**NETWORK, **SOFTMAX_EXPERTS, "router_normalizes": True},
    config=(
        *with_experts_instead_of_mlps(
            llama_entries(max_positions=131072, norm_epsilon=1e-5, num_kv_heads=8, rotary=Rotary(default_base=1e6))
        ),
        SeveralExperts("num_local_experts", "num_experts", 8),
        ExpertSize("num_experts_per_tok", "experts_per_token", 2),
        Fixed("router_jitter_noise", 0.0),  # it would change the inputs of experts, too
        WindowInAllBlocks(default=None),
        *ending_entries(),
    ),
    tensors={
        **_TENSORS,
        "block": {**_TENSORS["block"], **expert_tensors("block_sparse_moe", up="w3", gate="w1", down="w2")},
    },
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
