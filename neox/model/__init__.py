"""The network: GPT-NeoX's layers, built from the layer plan. Knows torch, not DeepSpeed."""

from neox.model.block import TransformerLayer
from neox.model.build import build_layer, initialize
from neox.model.cache import KVCache, LayerCache
from neox.model.ends import Embedding, FinalNorm, Head, TiedHead, tied_logits
from neox.model.gpt import GPT
from neox.model.initial_weights import shard
from neox.model.loss import lm_loss

__all__ = [
    "GPT",
    "Embedding",
    "FinalNorm",
    "Head",
    "KVCache",
    "LayerCache",
    "TiedHead",
    "TransformerLayer",
    "build_layer",
    "initialize",
    "lm_loss",
    "shard",
    "tied_logits",
]
