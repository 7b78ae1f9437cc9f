"""The network as torch modules, built from the run plan."""

from neox.model.attention import ATTENTION
from neox.model.block import TransformerLayer, run_blocks
from neox.model.build import build_layer, initialize
from neox.model.cache import KVCache, LayerCache
from neox.model.embedding import Embedding, FinalNorm, Head, TiedHead, tied_logits
from neox.model.gpt import GPT
from neox.model.loss import lm_loss
from neox.model.positions import POSITIONS

__all__ = [
    "ATTENTION",
    "GPT",
    "POSITIONS",
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
    "run_blocks",
    "tied_logits",
]
