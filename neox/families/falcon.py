"""Falcon (`FalconForCausalLM`): parallel residuals with one norm (7B, 11B) or two (40B, 180B), and few key heads.

Source: transformers, models/falcon. Rows of the fused projection are those of each key head: its queries, its keys, its
values. ALiBi (Falcon-RW) is not supported: transformers divides its biases by the root of the head's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neox.architecture import Architecture
from neox.families.config_entries import (
    ALL_GLOBAL,
    ATTENTION_BIASES_EQUAL,
    ConfigEntries,
    Derived,
    Dropout,
    Fields,
    Fixed,
    ModelSettings,
    Number,
    Size,
    Switch,
    four_times_hidden,
    hidden_per_head,
    query_heads,
)
from neox.families.family import Family, TensorSource, same_tensors
from neox.families.shared_entries import PLAIN_ACTIVATIONS, Activation, Rotary, ending_entries

_BLOCK = "transformer.h.{i}."


class _DecoderForm(ConfigEntries):
    """Residual and number of key heads: of the newer form (40B and later), or of the older one (7B)."""

    _NEW = Switch("new_decoder_architecture", "new", default=False)
    _ONE_KEY_HEAD = Switch("multi_query", "one", default=True)
    _PARALLEL = Switch("parallel_attn", "parallel", default=True)
    _KEY_HEADS = Size("num_kv_heads", "num_kv_heads", query_heads, null=query_heads)
    _NORMS = Size("num_ln_in_parallel_attn", "norms", None, null=None)

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason for each of the five entries that is wrong, or contradicts the form."""
        wrong: list[str] = []
        for entry in (self._NEW, self._ONE_KEY_HEAD, self._PARALLEL, self._KEY_HEADS, self._NORMS):
            wrong += entry.problems(hf)
        if wrong:
            yield from wrong
            return
        norms = hf.get("num_ln_in_parallel_attn")
        heads = hf.get("num_attention_heads", 71)
        if hf.get("new_decoder_architecture", False):
            if not hf.get("parallel_attn", True):
                yield "parallel_attn: False: contradicts new_decoder_architecture: True"
            if norms not in (None, 1, 2):
                yield f"num_ln_in_parallel_attn: {norms}: should be 1 or 2"
            return
        if norms not in (None, 1):
            yield f"num_ln_in_parallel_attn: {norms}: needs new_decoder_architecture: True"
        key_heads = hf.get("num_kv_heads")
        if not hf.get("multi_query", True) and key_heads not in (None, heads):
            yield f"num_kv_heads: {key_heads}: needs new_decoder_architecture: True"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the residual and the number of key heads."""
        key_heads = self._KEY_HEADS.read(hf, known)["num_kv_heads"]
        if hf.get("new_decoder_architecture", False):
            has_one_norm = hf.get("num_ln_in_parallel_attn") == 1
            return {"residual": "parallel_one_norm" if has_one_norm else "parallel", "num_kv_heads": key_heads}
        if hf.get("multi_query", True):
            key_heads = 1
        is_parallel = hf.get("parallel_attn", True)
        return {"residual": "parallel_one_norm" if is_parallel else "sequential", "num_kv_heads": key_heads}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the five entries, in the older form if it can express the network."""
        key_heads = network.num_kv_heads
        is_older = key_heads in (1, network.num_attention_heads) and network.residual != "parallel"
        if network.residual == "sequential":
            is_older = True
        return {
            "new_decoder_architecture": not is_older,
            "multi_query": key_heads == 1,
            "parallel_attn": network.residual != "sequential",
            "num_kv_heads": key_heads,
            "num_ln_in_parallel_attn": 2 if network.residual == "parallel" else 1,
        }


FALCON = Family(
    model_type="falcon",
    class_name="FalconForCausalLM",
    score_class="FalconForSequenceClassification",
    title="Falcon",
    fixed_fields={"norm": "layernorm"},
    config=(
        Size("num_hidden_layers", "num_layers", 32),
        Size("hidden_size", "hidden_size", 4544, other_keys=("n_embed",)),
        Size("num_attention_heads", "num_attention_heads", 71),
        Derived("head_dim", hidden_per_head),
        _DecoderForm(),
        ALL_GLOBAL,
        Size("ffn_hidden_size", "mlp_width", four_times_hidden, null=four_times_hidden),
        Activation("activation", PLAIN_ACTIVATIONS, "gelu"),
        Size("max_position_embeddings", "max_positions", 2048),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=True),
        Number("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Switch("bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        Derived("mlp_bias", lambda known: known["qkv_bias"]),
        Fixed("alibi", False),
        Rotary(),
        Dropout("attention_dropout", "attention_dropout"),
        Dropout("hidden_dropout", "hidden_dropout"),
        *ending_entries(65024),
    ),
    tensors={
        "embedding": {"word_embeddings": TensorSource(("transformer.word_embeddings",))},
        "block": {
            "attention.query_key_value": TensorSource(
                (f"{_BLOCK}self_attention.query_key_value",), layout="grouped_heads"
            ),
            **same_tensors(
                _BLOCK,
                {
                    "input_layernorm": "input_layernorm",
                    "attention.dense": "self_attention.dense",
                    "post_attention_layernorm": "post_attention_layernorm",
                    "mlp.dense_h_to_4h": "mlp.dense_h_to_4h",
                    "mlp.dense_4h_to_h": "mlp.dense_4h_to_h",
                },
            ),
        },
        "norm": {"norm": TensorSource(("transformer.ln_f",))},
        "head": {"final_linear": TensorSource(("lm_head",))},
    },
    base_prefix="transformer.",
    block_tensors={
        "parallel": same_tensors(_BLOCK, {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"})
    },
)
