"""Description of a network, and everything that follows from it on paper: parameters, layers, FLOPs. No torch."""

from neox.architecture.activations import ACTIVATIONS, Activation
from neox.architecture.adapters import add_adapters
from neox.architecture.architecture import GATED_KINDS, WITHOUT_LOGITS, Architecture, Difference, Pairs, frozen
from neox.architecture.choices import (
    ATTENTION,
    MLPS,
    NORMS,
    POSITIONS,
    Attention,
    MLPKind,
    Norm,
    Positions,
    block_losses,
    block_statistics,
)
from neox.architecture.experts import BALANCE_LOSS, DROPPED, LARGEST_SHARE, ROUTERS, Z_LOSS, RouterName
from neox.architecture.flops import forward_flops_per_token, recomputed_flops_per_token, training_flops_per_token
from neox.architecture.kernels import (
    FP8_MULTIPLE,
    LOSS_CHUNK,
    MASKED_QUERY_BLOCK,
    MOST_BLOCKED,
    QUERY_BLOCK,
    AttentionImpl,
)
from neox.architecture.layers import (
    BLOCK_OFFSET,
    RESIDUALS,
    VOCABULARY,
    WORD_EMBEDDINGS,
    LayerEntry,
    LayerKind,
    LayerPlan,
    NormSlots,
    Residual,
    build_layer_plan,
)
from neox.architecture.lora import ADAPTER, Lora, adapter_parameters
from neox.architecture.parameter import Initialization, ParameterSpec
from neox.architecture.rope_scaling import ROPE_SCALINGS, rope_scaling_of, rope_scaling_problem, rope_scaling_settings
from neox.architecture.sparsity import SPARSITY, settings_of, sparsity_of, sparsity_problem

__all__ = [
    "ACTIVATIONS",
    "ADAPTER",
    "ATTENTION",
    "BALANCE_LOSS",
    "BLOCK_OFFSET",
    "DROPPED",
    "FP8_MULTIPLE",
    "GATED_KINDS",
    "LARGEST_SHARE",
    "LOSS_CHUNK",
    "MASKED_QUERY_BLOCK",
    "MLPS",
    "MOST_BLOCKED",
    "NORMS",
    "POSITIONS",
    "QUERY_BLOCK",
    "RESIDUALS",
    "ROPE_SCALINGS",
    "ROUTERS",
    "RouterName",
    "SPARSITY",
    "VOCABULARY",
    "WITHOUT_LOGITS",
    "WORD_EMBEDDINGS",
    "Z_LOSS",
    "Activation",
    "Architecture",
    "Attention",
    "AttentionImpl",
    "Difference",
    "Initialization",
    "LayerEntry",
    "LayerKind",
    "LayerPlan",
    "NormSlots",
    "Lora",
    "MLPKind",
    "Norm",
    "Pairs",
    "ParameterSpec",
    "Positions",
    "Residual",
    "adapter_parameters",
    "block_losses",
    "block_statistics",
    "add_adapters",
    "build_layer_plan",
    "forward_flops_per_token",
    "rope_scaling_of",
    "rope_scaling_problem",
    "rope_scaling_settings",
    "settings_of",
    "sparsity_of",
    "sparsity_problem",
    "frozen",
    "recomputed_flops_per_token",
    "training_flops_per_token",
]
