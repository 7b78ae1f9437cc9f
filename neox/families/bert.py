"""BERT (`BertForPreTraining`) and Megatron-LM's BERT (`MegatronBertForPreTraining`), with both heads.

They differ in where norms stand. Source: transformers, models/bert and models/megatron_bert.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from neox.architecture import Architecture, LayerKind
from neox.families.config_json import PLAIN_ACTIVATIONS, SHAPE, check_entries, read_shape, write_shape
from neox.families.family import Family, ModelSettings, TensorSource

_DEFAULTS = MappingProxyType(
    {
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "attention_probs_dropout_prob": 0.1,
        "hidden_dropout_prob": 0.1,
        "tie_word_embeddings": True,
    }
)
_SHAPE = MappingProxyType({**SHAPE, "norm_epsilon": "layer_norm_eps", "token_types": "type_vocab_size"})
_SIZES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "bert": {
            "vocab_size": 30522,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
        },
        "megatron-bert": {
            "vocab_size": 29056,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    }
)
_FIXED = MappingProxyType(
    {
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "position_embedding_type": "absolute",
    }
)
_LAYER, _HEAD = "bert.encoder.layer.{i}.", "cls.predictions."


def _write_config(architecture: Architecture, settings: ModelSettings) -> dict[str, Any]:
    return {
        **write_shape(architecture, PLAIN_ACTIVATIONS, _SHAPE),
        "tie_word_embeddings": True,
        "attention_probs_dropout_prob": settings.attention_dropout,
        "hidden_dropout_prob": settings.hidden_dropout,
    }


def _bert(
    model_type: str, class_name: str, title: str, *, post_norm: bool, tensors: Mapping[LayerKind, Mapping[str, str]]
) -> Family:
    """Return one of the two families.

    Args:
        model_type: As in `config.json`.
        class_name: Model class.
        title: Name for messages.
        post_norm: Whether norms stand after each residual sum, and after the embeddings.
        tensors: Kind of layer -> our norm -> theirs.
    """

    def read_config(given: Mapping[str, Any]) -> tuple[Architecture, ModelSettings]:
        check_entries(given, fixed=_FIXED)
        hf = {**_DEFAULTS, **_SIZES[model_type], **given}
        architecture = Architecture(
            **read_shape(hf, PLAIN_ACTIVATIONS, _SHAPE),
            norm="layernorm",
            residual="post_norm" if post_norm else "sequential",
            positions="learned",
            rotary_ndims=0,
            rotary_base=0.0,
            bidirectional=True,
            embedding_norm=post_norm,
            sentence_head=True,
        )
        dropouts = {"attention_dropout": "attention_probs_dropout_prob", "hidden_dropout": "hidden_dropout_prob"}
        return architecture, ModelSettings.read(hf, **dropouts)

    sources = {
        kind: {ours: TensorSource((theirs,)) for ours, theirs in names.items()} for kind, names in _NAMES.items()
    }
    for kind, names in tensors.items():
        sources.setdefault(kind, {}).update({ours: TensorSource((theirs,)) for ours, theirs in names.items()})
    parts = tuple(f"{_LAYER}attention.self.{name}" for name in ("query", "key", "value"))
    sources["block"]["attention.query_key_value"] = TensorSource(parts, layout="heads")
    return Family(
        model_type=model_type,
        class_name=class_name,
        title=title,
        write_config=_write_config,
        read_config=read_config,
        tensors=MappingProxyType(sources),
        base_prefix="",
        key_aliases=MappingProxyType({"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}),
        buffers=("embeddings.position_ids",),
    )


_NAMES: Mapping[LayerKind, Mapping[str, str]] = MappingProxyType(
    {
        "embedding": {
            "word_embeddings": "bert.embeddings.word_embeddings",
            "position_embeddings": "bert.embeddings.position_embeddings",
            "tokentype_embeddings": "bert.embeddings.token_type_embeddings",
        },
        "block": {
            "attention.dense": f"{_LAYER}attention.output.dense",
            "mlp.dense_h_to_4h": f"{_LAYER}intermediate.dense",
            "mlp.dense_4h_to_h": f"{_LAYER}output.dense",
        },
        "masked_lm_head": {
            "dense": f"{_HEAD}transform.dense",
            "layernorm": f"{_HEAD}transform.LayerNorm",
            "final_linear": "cls.predictions",
        },
        "head": {"final_linear": f"{_HEAD}decoder"},
        "sentence_head": {"pooler.dense": "bert.pooler.dense", "binary_head": "cls.seq_relationship"},
    }
)
BERT = _bert(
    "bert",
    "BertForPreTraining",
    "BERT",
    post_norm=True,
    tensors={
        "embedding": {"norm": "bert.embeddings.LayerNorm"},
        "block": {
            "post_attention_layernorm": f"{_LAYER}attention.output.LayerNorm",
            "post_feedforward_layernorm": f"{_LAYER}output.LayerNorm",
        },
    },
)
MEGATRON_BERT = _bert(
    "megatron-bert",
    "MegatronBertForPreTraining",
    "Megatron-LM's BERT",
    post_norm=False,
    tensors={
        "block": {"input_layernorm": f"{_LAYER}attention.ln", "post_attention_layernorm": f"{_LAYER}ln"},
        "norm": {"norm": "bert.encoder.ln"},
    },
)
