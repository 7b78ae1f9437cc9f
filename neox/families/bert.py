"""BERT (`BertForPreTraining`) and Megatron-LM's BERT (`MegatronBertForPreTraining`), with both heads.

They differ in the places of their norms: BERT has them after each residual sum and after the embeddings, Megatron-LM's
BERT before each sublayer and at the end. Source: transformers, models/bert and models/megatron_bert.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from neox.architecture import LayerKind
from neox.families.config_entries import (
    ALL_GLOBAL,
    EQUAL_HEADS,
    ConfigEntries,
    Count,
    Dropout,
    Fields,
    Fixed,
    Number,
    Size,
    Written,
)
from neox.families.family import Family, TensorSource, same_tensors
from neox.families.shared_entries import PLAIN_ACTIVATIONS, Activation, ending_entries

_NETWORK: Fields = MappingProxyType(
    {
        "norm": "layernorm",
        "positions": "learned",
        "rotary_ndims": 0,
        "rotary_base": 0.0,
        "bidirectional": True,
        "sentence_head": True,
        "tie_word_embeddings": True,
    }
)
_ALIASES: Mapping[str, str] = MappingProxyType(
    {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
)
_BUFFERS = ("embeddings.position_ids",)
_BLOCK = "bert.encoder.layer.{i}."
_PROJECTIONS = tuple(f"{_BLOCK}attention.self.{name}" for name in ("query", "key", "value"))


def _config(
    *, num_layers: int, hidden_size: int, heads: int, mlp_width: int, vocab_size: int
) -> tuple[ConfigEntries, ...]:
    """Return the entries of `config.json`, with transformers' default sizes."""
    return (
        Size("num_hidden_layers", "num_layers", num_layers),
        Size("hidden_size", "hidden_size", hidden_size),
        Size("num_attention_heads", "num_attention_heads", heads),
        *EQUAL_HEADS,
        ALL_GLOBAL,
        Size("intermediate_size", "mlp_width", mlp_width),
        Activation("hidden_act", PLAIN_ACTIVATIONS, "gelu"),
        Size("max_position_embeddings", "max_positions", 512),
        Fixed("tie_word_embeddings", True),
        Written("tie_word_embeddings", True),
        Number("layer_norm_eps", "norm_epsilon", 1e-12),
        Count("type_vocab_size", "token_types", 2),
        Dropout("attention_probs_dropout_prob", "attention_dropout", 0.1),
        Dropout("hidden_dropout_prob", "hidden_dropout", 0.1),
        Fixed("is_decoder", False),
        Fixed("add_cross_attention", False),
        Fixed("position_embedding_type", "absolute"),
        *ending_entries(vocab_size),
    )


def _tensors(
    embedding_norms: Mapping[str, str], block_norms: Mapping[str, str], final_norms: Mapping[str, str]
) -> dict[LayerKind, Mapping[str, TensorSource]]:
    """Return the sources of all tensors.

    Args:
        embedding_norms: Norms of the embeddings: ours -> theirs.
        block_norms: Norms of a block.
        final_norms: Norms after the last block.
    """
    return {
        "embedding": {
            **same_tensors(
                "bert.embeddings.",
                {
                    "word_embeddings": "word_embeddings",
                    "position_embeddings": "position_embeddings",
                    "tokentype_embeddings": "token_type_embeddings",
                },
            ),
            **same_tensors("bert.embeddings.", embedding_norms),
        },
        "block": {
            "attention.query_key_value": TensorSource(_PROJECTIONS, layout="heads"),
            "attention.dense": TensorSource((f"{_BLOCK}attention.output.dense",)),
            "mlp.dense_h_to_4h": TensorSource((f"{_BLOCK}intermediate.dense",)),
            "mlp.dense_4h_to_h": TensorSource((f"{_BLOCK}output.dense",)),
            **same_tensors(_BLOCK, block_norms),
        },
        "norm": same_tensors("bert.encoder.", final_norms),
        "masked_lm_head": {
            "dense": TensorSource(("cls.predictions.transform.dense",)),
            "layernorm": TensorSource(("cls.predictions.transform.LayerNorm",)),
            "final_linear": TensorSource(("cls.predictions",)),
        },
        "head": {"final_linear": TensorSource(("cls.predictions.decoder",))},
        "sentence_head": {
            "pooler.dense": TensorSource(("bert.pooler.dense",)),
            "binary_head": TensorSource(("cls.seq_relationship",)),
        },
    }


BERT = Family(
    model_type="bert",
    class_name="BertForPreTraining",
    title="BERT",
    fixed_fields={**_NETWORK, "residual": "post_norm", "embedding_norm": True},
    config=_config(num_layers=12, hidden_size=768, heads=12, mlp_width=3072, vocab_size=30522),
    tensors=_tensors(
        embedding_norms={"norm": "LayerNorm"},
        block_norms={
            "post_attention_layernorm": "attention.output.LayerNorm",
            "post_feedforward_layernorm": "output.LayerNorm",
        },
        final_norms={},
    ),
    base_prefix="",
    key_aliases=_ALIASES,
    buffers=_BUFFERS,
)

MEGATRON_BERT = Family(
    model_type="megatron-bert",
    class_name="MegatronBertForPreTraining",
    title="Megatron-LM's BERT",
    fixed_fields={**_NETWORK, "residual": "sequential", "embedding_norm": False},
    config=_config(num_layers=24, hidden_size=1024, heads=16, mlp_width=4096, vocab_size=29056),
    tensors=_tensors(
        embedding_norms={},
        block_norms={"input_layernorm": "attention.ln", "post_attention_layernorm": "ln"},
        final_norms={"norm": "ln"},
    ),
    base_prefix="",
    key_aliases=_ALIASES,
    buffers=_BUFFERS,
)
