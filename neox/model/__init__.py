"""The network as torch modules, built from the run plan."""

from neox.model.attention import ATTENTION
from neox.model.block import Block, TransformerLayer, run_blocks, token_positions
from neox.model.build import build_layer, initialize
from neox.model.cache import KVCache, LayerCache
from neox.model.cache_step import CacheStep
from neox.model.cross_entropy import head_cross_entropy, vocab_parallel_cross_entropy
from neox.model.embedding import Embedding, FinalNorm, Head, LMHead
from neox.model.encoder import MaskedLMHead, SentenceHead, encoder_head
from neox.model.gpt import GPT
from neox.model.positions import POSITIONS
from neox.model.soft_prompt import SoftPrompt

__all__ = [
    "ATTENTION",
    "GPT",
    "Block",
    "CacheStep",
    "POSITIONS",
    "Embedding",
    "FinalNorm",
    "Head",
    "KVCache",
    "LMHead",
    "LayerCache",
    "MaskedLMHead",
    "SentenceHead",
    "SoftPrompt",
    "TransformerLayer",
    "build_layer",
    "encoder_head",
    "head_cross_entropy",
    "initialize",
    "run_blocks",
    "token_positions",
    "vocab_parallel_cross_entropy",
]
