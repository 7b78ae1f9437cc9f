"""Qwen3-Next and the text network of Qwen3.5 (`Qwen3NextForCausalLM`, `Qwen3_5ForCausalLM`).

Source: transformers, models/qwen3_next and models/qwen3_5. Three of four blocks have gated linear attention, the others
attention with a gate of its output. Scales of norms are around zero. Qwen3-Next has experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neox.families.config_entries import ATTENTION_BIASES_EQUAL, ConfigEntries, Derived, Fields, Switch
from neox.families.expert_entries import (
    QWEN_EXPERTS,
    SHARED_EXPERT,
    SOFTMAX_EXPERTS,
    ExpertSize,
    qwen_expert_entries,
)
from neox.families.family import Family, TensorSource
from neox.families.linear_attention import (
    MULTI_TOKEN,
    LinearAndFull,
    delta_tensors,
    linear_entries,
    linear_modules,
    of_linear_blocks,
    with_silu,
)
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, NORMS_OF_HEADS, llama_entries, llama_tensors
from neox.families.shared_entries import Rotary, ending_entries

_NETWORK: Fields = {**NETWORK, "norm": "rmsnorm_1p", "qk_norm": "head", "attention_output_gate": True}
_ATTENTION = tuple(f"model.layers.{{i}}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj"))
_CONVOLUTION = TensorSource(linear_modules("conv1d"))


class _NormOfHeads(Derived):
    """The epsilon of the norm of linear attention's heads."""

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the field."""
        return of_linear_blocks(known, super().read(hf, known))


def _entries(*, kv_heads: int, rotary: Rotary) -> tuple[ConfigEntries, ...]:
    """Return the entries that both have."""
    return (
        *with_silu(llama_entries(max_positions=32768, num_kv_heads=kv_heads, head_dim=256, rotary=rotary)),
        Switch("attention_bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        LinearAndFull("full_attention_interval"),
        *linear_entries(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        _NormOfHeads("linear_norm_epsilon", lambda known: known["norm_epsilon"]),
    )


def _block(projection: TensorSource) -> dict[str, TensorSource]:
    """Return the sources of a block's modules, with that of linear attention's input projection."""
    return {
        **llama_tensors(NORMS_OF_HEADS)["block"],
        "attention.query_key_value": TensorSource(_ATTENTION, layout="gated_heads"),
        **delta_tensors(projection=projection, convolution=_CONVOLUTION, norm="norm", output="out_proj"),
    }


class _TextRotary(Rotary):
    """Rotary positions of a model that sees images. Of texts, all three kinds of positions are the same."""

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield the reasons against the entries without those of images."""
        yield from super().problems(_without_images(hf))

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return what the entries without those of images say."""
        return super().read(_without_images(hf), known)


def _without_images(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = hf.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return hf
    kept = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {**hf, "rope_parameters": kept}


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    score_class="Qwen3NextForSequenceClassification",
    title="Qwen3-Next",
    fixed_fields={**_NETWORK, **SOFTMAX_EXPERTS, "shared_expert_gate": True},
    config=(
        *_entries(kv_heads=2, rotary=Rotary(fraction_key="partial_rotary_factor", default_fraction=0.25)),
        *qwen_expert_entries(number=512, per_token=10, width=512, normalizes=True),
        ExpertSize("shared_expert_intermediate_size", "shared_expert_width", 512),
        *ending_entries(),
    ),
    tensors={
        **llama_tensors(),
        "block": {
            **_block(
                TensorSource(linear_modules("in_proj_qkvz", "in_proj_ba"), layout="grouped_delta_heads"),
            ),
            **QWEN_EXPERTS,
            **SHARED_EXPERT,
        },
    },
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
    ignored=MULTI_TOKEN,
)

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    score_class="Qwen3_5TextForSequenceClassification",
    title="Qwen3.5",
    fixed_fields=_NETWORK,
    config=(
        *_entries(kv_heads=4, rotary=_TextRotary(fraction_key="partial_rotary_factor", default_fraction=0.25)),
        *ending_entries(),
    ),
    tensors={
        **llama_tensors(),
        "block": _block(
            TensorSource(linear_modules("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), layout="delta_heads"),
        ),
    },
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
    ignored=MULTI_TOKEN,
)
