"""Fast operations, each beside its torch reference. Tensors, numbers and literals only."""

from neox.ops.attention import AttentionImpl, core_attention, same_document_pairs
from neox.ops.gelu import bias_gelu, gelu, gelu_tanh
from neox.ops.linear import linear
from neox.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from neox.ops.rotary import apply_rotary, rotary_inv_freq, rotary_tables, rotate
from neox.ops.softmax import MASKED_SCORE, SoftmaxImpl, scale_mask_softmax

__all__ = [
    "MASKED_SCORE",
    "AttentionImpl",
    "SoftmaxImpl",
    "apply_rotary",
    "bias_gelu",
    "core_attention",
    "gelu",
    "gelu_tanh",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "rotary_inv_freq",
    "rotary_tables",
    "rotate",
    "same_document_pairs",
    "scale_mask_softmax",
]
