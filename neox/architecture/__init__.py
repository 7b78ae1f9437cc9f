"""Description of a network, and everything that follows from it on paper: parameters, layers, FLOPs. No torch."""

from neox.architecture.activations import ACTIVATIONS, Activation
from neox.architecture.adapters import add_adapters
from neox.architecture.architecture import (
    WITHOUT_LOGITS,
    Architecture,
    Difference,
    NetworkFields,
    Pairs,
    frozen,
)
from neox.architecture.attention import Attention
from neox.architecture.block_kind import BlockKind, MicroBatch
from neox.architecture.blocks import BLOCKS, block_kinds, generates_by_steps
from neox.architecture.choices import (
    MLPS,
    NORMS,
    POSITIONS,
    MLPKind,
    Norm,
    Positions,
    block_losses,
    block_statistics,
)
from neox.architecture.experts import BALANCE_LOSS, DROPPED, LARGEST_SHARE, ROUTERS, Z_LOSS, RouterName
from neox.architecture.fast_paths import FAST_PATHS, DeviceFamily, FastPath, FastPathName
from neox.architecture.flops import forward_flops_per_token, recomputed_flops_per_token, training_flops_per_token
from neox.architecture.kernels import (
    FLEX_HEAD_DIM,
    FP8_MULTIPLE,
    LOSS_CHUNK,
    MASKED_QUERY_BLOCK,
    MASKED_QUERY_CHUNK,
    MASKED_SCORES,
    MOST_BLOCKED,
    QUERY_BLOCK,
    AttentionImpl,
)
from neox.architecture.layers import (
    BLOCK_OFFSET,
    VOCABULARY,
    WORD_EMBEDDINGS,
    LayerEntry,
    LayerKind,
    LayerPlan,
    build_layer_plan,
)
from neox.architecture.lora import ADAPTER, Lora, adapter_parameters
from neox.architecture.parameter import (
    Constant,
    FromKey,
    InitialValues,
    Normal,
    ParameterSpec,
    Uniform,
)
from neox.architecture.residual import RESIDUALS, NormSlots, Residual
from neox.architecture.rope_scaling import ROPE_SCALINGS, rope_scaling_of, rope_scaling_problem, rope_scaling_settings
from neox.architecture.sparsity import SPARSITY, settings_of, sparsity_of, sparsity_problem

__all__ = [
    "ACTIVATIONS",
    "ADAPTER",
    "BALANCE_LOSS",
    "BLOCKS",
    "BLOCK_OFFSET",
    "DROPPED",
    "FAST_PATHS",
    "FP8_MULTIPLE",
    "LARGEST_SHARE",
    "LOSS_CHUNK",
    "FLEX_HEAD_DIM",
    "MASKED_QUERY_BLOCK",
    "MASKED_QUERY_CHUNK",
    "MASKED_SCORES",
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
    "Constant",
    "BlockKind",
    "DeviceFamily",
    "Difference",
    "FastPath",
    "FastPathName",
    "FromKey",
    "InitialValues",
    "LayerEntry",
    "LayerKind",
    "LayerPlan",
    "MicroBatch",
    "NetworkFields",
    "NormSlots",
    "Lora",
    "MLPKind",
    "Norm",
    "Normal",
    "Pairs",
    "ParameterSpec",
    "Positions",
    "Residual",
    "Uniform",
    "adapter_parameters",
    "block_kinds",
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
    "generates_by_steps",
    "recomputed_flops_per_token",
    "training_flops_per_token",
]
