"""Operations on tensors; next to each fast one stands its torch reference."""

from types import MappingProxyType

import torch

from neox.architecture import AttentionImpl
from neox.ops import recurrent_kernels
from neox.ops.activations import ACTIVATIONS
from neox.ops.attention import (
    attention_by_chunks,
    core_attention,
    dot_product_attention,
    explicit_attention,
    masked_bias,
    unpadded_keys,
)
from neox.ops.attention_scores import largest_score
from neox.ops.blocked_attention import blocked_attention
from neox.ops.causal_convolution import causal_convolution
from neox.ops.chunks import StateScan, in_chunks, starts_in_chunks
from neox.ops.cross_entropy import label_scores, logits_gradient
from neox.ops.fast_paths import device_family, has_fast_path, machine_has_fast_path
from neox.ops.flex import block_mask_of
from neox.ops.fp8 import FP8_RECIPES, Fp8Recipe
from neox.ops.gated_delta import gated_delta_recurrence, gated_delta_scan
from neox.ops.grouped_linear import ExpertOrder, combine_rows, gather_rows, grouped_linear, sort_by_expert
from neox.ops.linear import add_product, linear
from neox.ops.norms import NORMS, build_norm
from neox.ops.packed_linear import PackedWeight, can_pack
from neox.ops.position_bias import alibi_slopes, relative_buckets
from neox.ops.rotary import rotary_divisors, rotary_factor, rotary_inv_freq, rotary_tables, rotate
from neox.ops.routing import (
    ROUTERS,
    WHOLE_SAMPLES,
    Routes,
    SampleTokens,
    balance_loss,
    route,
    sinkhorn,
    tokens_per_expert,
    z_loss,
)
from neox.ops.softcap import softly_capped
from neox.ops.softmax import MASKED_SCORE, SoftmaxImpl, scale_mask_softmax
from neox.ops.sparsity import block_layout, sparse_rule
from neox.ops.visible_pairs import PairRule, VisiblePairs, rule_of_heads, window_rule
from neox.ops.wkv import wkv_recurrence, wkv_scan

DTYPES = MappingProxyType({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16})
"""Type of a precision's parameters."""

__all__ = [
    "ACTIVATIONS",
    "AttentionImpl",
    "DTYPES",
    "ExpertOrder",
    "FP8_RECIPES",
    "Fp8Recipe",
    "MASKED_SCORE",
    "NORMS",
    "PackedWeight",
    "PairRule",
    "ROUTERS",
    "Routes",
    "SampleTokens",
    "SoftmaxImpl",
    "StateScan",
    "VisiblePairs",
    "WHOLE_SAMPLES",
    "add_product",
    "alibi_slopes",
    "attention_by_chunks",
    "balance_loss",
    "block_layout",
    "block_mask_of",
    "blocked_attention",
    "build_norm",
    "can_pack",
    "causal_convolution",
    "combine_rows",
    "core_attention",
    "device_family",
    "dot_product_attention",
    "explicit_attention",
    "gated_delta_recurrence",
    "gated_delta_scan",
    "gather_rows",
    "grouped_linear",
    "has_fast_path",
    "in_chunks",
    "label_scores",
    "largest_score",
    "linear",
    "logits_gradient",
    "machine_has_fast_path",
    "masked_bias",
    "recurrent_kernels",
    "relative_buckets",
    "rotary_divisors",
    "rotary_factor",
    "rotary_inv_freq",
    "rotary_tables",
    "rotate",
    "route",
    "rule_of_heads",
    "scale_mask_softmax",
    "sinkhorn",
    "softly_capped",
    "sort_by_expert",
    "sparse_rule",
    "starts_in_chunks",
    "tokens_per_expert",
    "unpadded_keys",
    "window_rule",
    "wkv_recurrence",
    "wkv_scan",
    "z_loss",
]
