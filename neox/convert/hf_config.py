"""`config.json` and `generation_config.json` of Hugging Face's GPT-NeoX, written from NeoX's keys and read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neox.config import NeoXConfig
from neox.errors import ConversionError

# `torch_dtype` values and what they mean here.
_DTYPE_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_ERF_GELU, _TANH_GELU = "gelu", "gelu_fast"
_TANH_NAMES = (_TANH_GELU, "gelu_new", "gelu_pytorch_tanh")


def hf_config(config: NeoXConfig, *, vocab_size: int, eod: int | None, dtype: str) -> dict[str, Any]:
    """The contents of `config.json`.

    vocab_size: rows of the exported embedding. eod: end-of-document id, becoming bos and eos. dtype: torch's name.
    Rotary is given both as transformers 4 reads it (`rotary_pct`, `rotary_emb_base`) and as 5 does (`rope_parameters`).
    """
    model = config.model
    assert model.hidden_size is not None
    rotary = {"rotary_pct": model.rotary_pct, "rotary_emb_base": model.rotary_emb_base}
    rope = {
        "rope_type": "default",
        "rope_theta": float(model.rotary_emb_base),
        "partial_rotary_factor": model.rotary_pct,
    }
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": 4 * model.hidden_size,
        "hidden_act": _TANH_GELU if model.bias_gelu_fusion else _ERF_GELU,
        "max_position_embeddings": model.max_position_embeddings or model.seq_length,
        "layer_norm_eps": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "use_parallel_residual": model.gpt_j_residual,
        "tie_word_embeddings": not model.no_weight_tying,
        "attention_bias": True,
        "attention_dropout": config.training.attention_dropout,
        "hidden_dropout": config.training.hidden_dropout,
        **rotary,
        "rope_parameters": rope,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def generation_config(eod: int | None) -> dict[str, Any]:
    """The contents of `generation_config.json`."""
    return {"_from_model_config": True, "bos_token_id": eod, "eos_token_id": eod}


def neox_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    """NeoX's flat keys for a Hugging Face GPT-NeoX `config.json`.

    Raises ConversionError with every reason why it cannot be expressed here.
    """
    problems = []
    if hf.get("model_type") != "gpt_neox":
        problems.append(f"model_type: {hf.get('model_type')}: only gpt_neox is read")
    hidden = hf.get("hidden_size", 6144)
    intermediate = hf.get("intermediate_size", 4 * hidden)
    if intermediate != 4 * hidden:
        problems.append(f"intermediate_size: {intermediate}: the MLP here is 4 x hidden_size = {4 * hidden}")
    act = hf.get("hidden_act", _ERF_GELU)
    if act != _ERF_GELU and act not in _TANH_NAMES:
        problems.append(f"hidden_act: {act}: only gelu and {', '.join(_TANH_NAMES)} exist here")
    if hf.get("attention_bias", True) is False:
        problems.append("attention_bias: false: attention has biases here")
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        problems.append(f"rope type {kind}: scaled rotary positions do not exist here")
    if problems:
        raise ConversionError("this Hugging Face model cannot be expressed here:\n  " + "\n  ".join(problems))
    base = rope.get("rope_theta", hf.get("rotary_emb_base", 10000))
    positions = hf.get("max_position_embeddings", 2048)
    return {
        "num_layers": hf.get("num_hidden_layers", 44),
        "hidden_size": hidden,
        "num_attention_heads": hf.get("num_attention_heads", 64),
        "seq_length": positions,
        "max_position_embeddings": positions,
        "norm": "layernorm",
        "layernorm_epsilon": hf.get("layer_norm_eps", 1e-5),
        "pos_emb": "rotary",
        "rotary_pct": rope.get("partial_rotary_factor", hf.get("rotary_pct", 0.25)),
        "rotary_emb_base": int(base),
        "no_weight_tying": not hf.get("tie_word_embeddings", False),
        "gpt_j_residual": hf.get("use_parallel_residual", True),
        "output_layer_parallelism": "column",
        "bias_gelu_fusion": act in _TANH_NAMES,
        "attention_dropout": hf.get("attention_dropout", 0.0),
        "hidden_dropout": hf.get("hidden_dropout", 0.0),
        "precision": _DTYPE_NAMES.get(str(hf.get("torch_dtype", hf.get("dtype", "float32"))), "fp32"),
    }
