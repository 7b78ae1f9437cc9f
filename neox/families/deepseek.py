"""DeepSeek-V2 and DeepSeek-V3 (`DeepseekV2ForCausalLM`, `DeepseekV3ForCausalLM`): latent attention and experts.

Source: transformers, models/deepseek_v2 and models/deepseek_v3; arXiv:2405.04434, arXiv:2412.19437. Layers behind the
last block (`num_nextn_predict_layers`) are the modules of multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log
from types import MappingProxyType
from typing import Any

from neox.architecture import Architecture
from neox.families.config_entries import (
    REQUIRED,
    ConfigEntries,
    Count,
    Derived,
    Dropout,
    Factor,
    Fields,
    Fixed,
    ModelSettings,
    Number,
    Size,
    Switch,
    is_whole_number,
    query_heads,
)
from neox.families.expert_entries import ExpertSize, SeveralExperts, expert_tensors
from neox.families.family import Family, TensorSource, same_tensors
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, llama_tensors
from neox.families.shared_entries import GATED_ACTIVATIONS, Activation, Rotary, ending_entries

_BLOCK = "model.layers.{i}."
FURTHER_LAYERS = "num_nextn_predict_layers"
"""Key of the number of multi-token prediction layers."""
MULTI_TOKEN = Count(FURTHER_LAYERS, "mtp_num_layers", 1, null=0)
"""The entry of that number."""


class LatentHeads(ConfigEntries):
    """Widths of latent attention and its heads. Query heads do not share key heads."""

    _DEFAULTS: Mapping[str, int] = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    _QUERY_WIDTH = 1536

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason for each invalid width, for an odd rotary width, and for shared key heads."""
        for key, default in self._DEFAULTS.items():
            yield from Size(key, key, default).problems(hf)
        yield from Size("q_lora_rank", "query_latent_width", self._QUERY_WIDTH, null=0).problems(hf)
        rotated = hf.get("qk_rope_head_dim", 0)
        if is_whole_number(rotated) and rotated % 2:
            yield f"qk_rope_head_dim: {rotated}: should be even"
        heads = hf.get("num_attention_heads")
        key_heads = hf.get("num_key_value_heads", heads)
        if key_heads not in (None, heads):
            yield f"num_key_value_heads: {key_heads!r}: should be num_attention_heads"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the widths."""
        width = {key: hf.get(key, default) for key, default in self._DEFAULTS.items()}
        return {
            "attention": ("latent",) * known["num_layers"],
            "latent_width": width["kv_lora_rank"],
            "query_latent_width": hf.get("q_lora_rank", self._QUERY_WIDTH) or 0,
            "head_dim": width["qk_nope_head_dim"] + width["qk_rope_head_dim"],
            "rotary_ndims": width["qk_rope_head_dim"],
            "value_head_dim": width["v_head_dim"],
        }

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entries. For a network without latent attention they have the smallest valid values."""
        return {
            "num_key_value_heads": network.num_attention_heads,  # without it transformers would use its default, 128
            "kv_lora_rank": max(1, network.latent_width),
            "q_lora_rank": network.query_latent_width or None,
            "qk_nope_head_dim": max(1, network.head_dim - network.rotary_ndims),
            "qk_rope_head_dim": max(2, network.rotary_ndims),
            "v_head_dim": max(1, network.value_head_dim),
        }


class LatentRotary(Rotary):
    """Rotary positions, and the attention scale that their scaling implies. `LatentHeads` must be read first.

    The attention scale is multiplied by the square of YaRN's factor for `mscale_all_dim`.
    """

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the base, the scaling and the attention scale."""
        found = {**super().read(hf, known), "rotary_ndims": known["rotary_ndims"], "attention_scale": 0.0}
        scaling = dict(found["rope_scaling"])
        weight = scaling.get("mscale_all_dim", 0)
        if weight and scaling["factor"] > 1:
            yarn_factor = 0.1 * weight * log(scaling["factor"]) + 1.0
            found["attention_scale"] = (
                known["head_dim"] ** -0.5 * yarn_factor * yarn_factor
            )  # rounded as in transformers
        return found


class RoutedExperts(SeveralExperts):
    """The number of routed experts, which has only one key."""

    def _with_own_name(self, hf: Mapping[str, Any]) -> Mapping[str, Any]:
        return hf


@dataclass(frozen=True)
class SharedExperts(ConfigEntries):
    """The number of shared experts. Here they are one shared expert that is as wide as all of them together.

    Attributes:
        default: transformers' default.
    """

    default: int

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if the number is invalid."""
        yield from Size("n_shared_experts", "shared_expert_width", self.default).problems(hf)

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the width."""
        return {"shared_expert_width": hf.get("n_shared_experts", self.default) * known["expert_width"]}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry."""
        return {"n_shared_experts": max(1, network.shared_expert_width // max(1, network.expert_width))}


@dataclass(frozen=True)
class FirstDenseBlocks(ConfigEntries):
    """The number of dense blocks before the first block with experts.

    Attributes:
        default: transformers' default.
    """

    default: int

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if the number is invalid, or leaves no block with experts."""
        number = hf.get("first_k_dense_replace", self.default)
        blocks = hf.get("num_hidden_layers")
        if not is_whole_number(number) or number < 0:
            yield f"first_k_dense_replace: {number!r}: should be a whole number of at least 0"
        elif is_whole_number(blocks) and number >= blocks:
            yield f"first_k_dense_replace: {number}: should be less than num_hidden_layers: {blocks}"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the blocks with experts."""
        first = hf.get("first_k_dense_replace", self.default)
        return {"expert_blocks": tuple(range(first, known["num_layers"]))}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry."""
        return {"first_k_dense_replace": min(network.num_layers - 1, network.num_layers - len(network.expert_blocks))}


@dataclass(frozen=True)
class ExpertGroups(ConfigEntries):
    """Groups of experts for group-limited routing. A single group means routing without groups.

    Attributes:
        groups: transformers' default number of groups; None for no groups.
        chosen: transformers' default number of groups that a token chooses.
        best: Number of best expert scores that are summed up to the score of a group.
        method: Value of `topk_method` with groups; without groups it is `greedy`. Empty if there is no such entry.
    """

    groups: int | None
    chosen: int | None
    best: int
    method: str = ""

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield the reasons why the numbers are invalid or contradict each other."""
        for key, default in (("n_group", self.groups), ("topk_group", self.chosen)):
            yield from Size(key, key, default, null=0).problems(hf)
        method = hf.get("topk_method")
        if self.method and method not in (None, "greedy", self.method):
            yield f"topk_method: {method!r}: should be greedy or {self.method}"
        groups, chosen = self._numbers(hf)
        experts = hf.get("n_routed_experts")
        if not all(map(is_whole_number, (groups, chosen, experts))) or groups < 2:
            return
        if experts % groups or experts // groups < self.best:
            yield f"n_group: {groups}: should divide n_routed_experts: {experts} into groups of at least {self.best}"
        elif chosen > groups or chosen < 1:
            yield f"topk_group: {chosen}: should be at least 1 and at most n_group: {groups}"
        elif is_whole_number(hf.get("num_experts_per_tok")) and hf["num_experts_per_tok"] > experts // groups * chosen:
            yield f"num_experts_per_tok: {hf['num_experts_per_tok']}: is more than the experts of the chosen groups"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the groups."""
        groups, chosen = self._numbers(hf)
        if groups < 2:
            return {"router_groups": 0, "router_top_groups": 0, "router_group_best": 0}
        return {"router_groups": groups, "router_top_groups": chosen, "router_group_best": self.best}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entries."""
        entries: dict[str, Any] = {"n_group": network.router_groups or 1, "topk_group": network.router_top_groups or 1}
        if self.method:
            entries["topk_method"] = self.method if network.router_groups else "greedy"
        return entries

    def _numbers(self, hf: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the number of groups and the number that a token chooses; both are 0 without groups."""
        groups = hf.get("n_group", self.groups) or 0
        chosen = hf.get("topk_group", self.chosen) or 0
        if self.method and hf.get("topk_method", "greedy") != self.method:
            return 0, 0
        return groups, chosen


def _entries(
    *, attention: tuple[ConfigEntries, ...], experts: tuple[ConfigEntries, ...], max_positions: int, sizes: Fields
) -> tuple[ConfigEntries, ...]:
    """Return the entries of a `config.json`.

    Args:
        attention: Attention entries that only one of the families has.
        experts: Expert entries that only one of the families has.
        max_positions: transformers' default of `max_position_embeddings`.
        sizes: transformers' defaults of the numbers and sizes of experts.
    """
    return (
        Size("num_hidden_layers", "num_layers"),
        Size("hidden_size", "hidden_size"),
        Size("num_attention_heads", "num_attention_heads"),
        Derived("num_kv_heads", query_heads),
        Size("intermediate_size", "mlp_width"),
        Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
        Size("max_position_embeddings", "max_positions", max_positions),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=False),
        Number("rms_norm_eps", "norm_epsilon", 1e-6),
        LatentHeads(),
        LatentRotary(),
        Fixed("attention_bias", False),
        Dropout("attention_dropout", "attention_dropout"),
        *attention,
        RoutedExperts("n_routed_experts", "num_experts", sizes["number"]),
        ExpertSize("num_experts_per_tok", "experts_per_token", sizes["per_token"]),
        ExpertSize("moe_intermediate_size", "expert_width", sizes["width"]),
        SharedExperts(sizes["shared"]),
        FirstDenseBlocks(sizes["first_dense"]),
        Fixed("moe_layer_freq", 1),
        Factor("routed_scaling_factor", "router_scale", sizes["scale"]),
        *experts,
        *ending_entries(),
    )


_LATENT = {
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm",
    "attention.key_value_norm": "self_attn.kv_a_layernorm",
    "attention.key_value_up": "self_attn.kv_b_proj",
}
_TENSORS = llama_tensors()
_KEYS = TensorSource((f"{_BLOCK}self_attn.kv_a_proj_with_mqa",), layout="latent_keys")
EXPERT_TENSORS = {
    **expert_tensors("mlp", up="up_proj", gate="gate_proj", down="down_proj"),
    "mlp.shared_expert.dense_h_to_4h": TensorSource(
        (f"{_BLOCK}mlp.shared_experts.up_proj", f"{_BLOCK}mlp.shared_experts.gate_proj")
    ),
    "mlp.shared_expert.dense_4h_to_h": TensorSource((f"{_BLOCK}mlp.shared_experts.down_proj",)),
}
"""Sources of the router, the routed experts and the shared expert."""
_SOURCES = {
    **_TENSORS,
    "block": {
        **_TENSORS["block"],
        **same_tensors(_BLOCK, _LATENT),
        "attention.query": TensorSource((f"{_BLOCK}self_attn.q_proj",), layout="latent_queries"),
        "attention.query_up": TensorSource((f"{_BLOCK}self_attn.q_b_proj",), layout="latent_queries"),
        "attention.key_value_down": _KEYS,
        **EXPERT_TENSORS,
    },
}

V3_NAMES: Mapping[str, str] = MappingProxyType(
    {"num_local_experts": "n_routed_experts", "num_mtp_layers": FURTHER_LAYERS}
)
"""Further names that transformers reads in the `config.json` of DeepSeek-V3 and GLM-4.5 -> their own names."""

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    score_class="DeepseekV3ForSequenceClassification",
    title="DeepSeek-V3",
    fixed_fields={**NETWORK, "router": "sigmoid", "router_bias": True},
    config=_entries(
        attention=(Fixed("rope_interleave", True),),
        experts=(
            Fixed("scoring_func", "sigmoid"),
            Fixed("topk_method", "noaux_tc"),
            Switch("norm_topk_prob", "router_normalizes", default=True),
            ExpertGroups(8, 4, best=2),
            MULTI_TOKEN,
        ),
        max_positions=4096,
        sizes={"number": 256, "per_token": 8, "width": 2048, "shared": 1, "first_dense": 3, "scale": 2.5},
    ),
    tensors=_SOURCES,
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
    other_names=V3_NAMES,
    further_layers_key=FURTHER_LAYERS,
)

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    class_name="DeepseekV2ForCausalLM",
    score_class="DeepseekV2ForSequenceClassification",
    title="DeepSeek-V2",
    fixed_fields={**NETWORK, "router": "topk"},
    config=_entries(
        attention=(Fixed("mlp_bias", False),),
        experts=(
            Fixed("scoring_func", "softmax"),
            Fixed("norm_topk_prob", False),
            ExpertGroups(None, None, best=1, method="group_limited_greedy"),
        ),
        max_positions=2048,
        sizes={"number": 64, "per_token": REQUIRED, "width": 1407, "shared": 2, "first_dense": 0, "scale": 1.0},
    ),
    tensors=_SOURCES,
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
    other_names={"num_experts": "n_routed_experts"},
)
