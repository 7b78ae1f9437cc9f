"""Operations on tensors; next to each fast one stands its torch reference."""

from types import MappingProxyType

import torch

from neox.architecture import AttentionImpl
from neox.ops.activations import ACTIVATIONS
from neox.ops.attention import core_attention, masked_bias, same_document_pairs, unpadded_keys
from neox.ops.cross_entropy import label_scores, logits_gradient
from neox.ops.fp8 import FP8_RECIPES, Fp8Recipe
from neox.ops.linear import add_product, linear
from neox.ops.norms import NORMS
from neox.ops.packed_linear import PackedWeight, can_pack
from neox.ops.position_bias import alibi_slopes, relative_buckets
from neox.ops.rotary import rotary_factor, rotary_inv_freq, rotary_tables, rotate
from neox.ops.softmax import MASKED_SCORE, SoftmaxImpl, scale_mask_softmax
from neox.ops.sparsity import block_layout, sparse_pairs

DTYPES = MappingProxyType({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16})
"""Type of a precision's parameters."""

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "FP8_RECIPES",
    "NORMS",
    "MASKED_SCORE",
    "AttentionImpl",
    "Fp8Recipe",
    "PackedWeight",
    "add_product",
    "alibi_slopes",
    "can_pack",
    "SoftmaxImpl",
    "block_layout",
    "core_attention",
    "label_scores",
    "linear",
    "logits_gradient",
    "masked_bias",
    "relative_buckets",
    "rotary_factor",
    "rotary_inv_freq",
    "rotary_tables",
    "rotate",
    "same_document_pairs",
    "sparse_pairs",
    "scale_mask_softmax",
    "unpadded_keys",
]
