"""GPT-J (`GPTJForCausalLM`): attention and MLP read one norm, and rotary positions turn neighbouring dimensions.

Source: transformers, models/gptj. Attention has no biases, the MLP and the head have.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from neox.architecture import Architecture
from neox.families.config_json import check_entries
from neox.families.family import Family, ModelSettings, TensorSource
from neox.families.gpt2 import read_fields, read_settings, write_entries

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 50400,
        "n_positions": 2048,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "rotary_dim": 64,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    }
)


def _write_config(architecture: Architecture, settings: ModelSettings) -> dict[str, Any]:
    return {**write_entries(architecture, settings), "rotary_dim": architecture.rotary_ndims}


def _read_config(given: Mapping[str, Any]) -> tuple[Architecture, ModelSettings]:
    hf = {**_DEFAULTS, **given}
    check_entries(hf, needed=("rotary_dim",))
    architecture = Architecture(
        residual="parallel_one_norm",
        qkv_bias=False,
        attention_output_bias=False,
        head_bias=True,
        positions="rotary",
        rotary_ndims=hf["rotary_dim"],
        rotary_base=10000.0,
        **read_fields(hf),
    )
    return architecture, read_settings(hf)


GPTJ = Family(
    model_type="gptj",
    class_name="GPTJForCausalLM",
    title="GPT-J",
    write_config=_write_config,
    read_config=_read_config,
    tensors=MappingProxyType(
        {
            "embedding": {"word_embeddings": TensorSource(("transformer.wte",))},
            "block": {
                "input_layernorm": TensorSource(("transformer.h.{i}.ln_1",)),
                "attention.query_key_value": TensorSource(
                    tuple("transformer.h.{i}.attn." + f"{name}_proj" for name in "qkv"),
                    layout="heads",
                    interleaved=True,
                ),
                "attention.dense": TensorSource(("transformer.h.{i}.attn.out_proj",)),
                "mlp.dense_h_to_4h": TensorSource(("transformer.h.{i}.mlp.fc_in",)),
                "mlp.dense_4h_to_h": TensorSource(("transformer.h.{i}.mlp.fc_out",)),
            },
            "norm": {"norm": TensorSource(("transformer.ln_f",))},
            "head": {"final_linear": TensorSource(("lm_head",))},
        }
    ),
    base_prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions"),
)
