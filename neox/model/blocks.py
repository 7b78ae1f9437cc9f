"""Table of blocks as modules, by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Unpack

from neox.architecture import SPARSITY
from neox.log import get_logger
from neox.model.attention import SelfAttention, SparseSelfAttention, WindowedSelfAttention
from neox.model.block import Block, TransformerLayer
from neox.model.gmlp import GatedMLPLayer
from neox.model.latent_attention import LatentSelfAttention
from neox.ops import AttentionImpl, machine_has_fast_path
from neox.parallel import ParallelGrid, TensorOptions
from neox.plan.run_plan import RunPlan


def _transformer(attention: type[SelfAttention]) -> Callable[..., Block]:
    """Return the constructor of a block with attention and an MLP."""

    def build(plan: RunPlan, number: int, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> Block:
        training = plan.config.training
        block = TransformerLayer(
            plan.architecture,
            number,
            grid,
            attention=attention,
            impl=_attention_impl(plan, number),
            attention_dropout=training.attention_dropout,
            hidden_dropout=training.hidden_dropout,
            layer_scaling=plan.config.model.apply_query_key_layer_scaling,
            tile_size=training.mlp_tile_size,
            **options,
        )
        part = training.recomputed_part(number)
        if part != "full":  # `Stage` recomputes whole blocks
            block.attention.recompute = part
        return block

    return build


def _gated(plan: RunPlan, number: int, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> Block:
    """Build a block with a gate over positions."""
    return GatedMLPLayer(plan.architecture, number, grid, **options)


BLOCKS: Mapping[str, Callable[..., Block]] = MappingProxyType(
    {
        "global": _transformer(SelfAttention),
        "sliding_window": _transformer(WindowedSelfAttention),
        "latent": _transformer(LatentSelfAttention),
        **dict.fromkeys(SPARSITY, _transformer(SparseSelfAttention)),
        "gmlp": _gated,
        "amlp": _gated,
    }
)
"""Kind of block (`Architecture.attention`) -> constructor (plan, number of the block, grid, device=, dtype=)."""


def _attention_impl(plan: RunPlan, block: int) -> AttentionImpl:
    """Return a block's attention kernel. Without a GPU, torch's operations replace the fused kernel, with one warning.

    The machine decides, not the device on which the layer is built: its weights may be made elsewhere and moved.
    """
    wanted = plan.attention[block]
    if wanted != "fused" or machine_has_fast_path("triton"):
        return wanted
    if block == 0:
        get_logger(__name__).warning(
            "scaled_upper_triang_masked_softmax_fusion: the fused kernel needs a GPU; "
            "on this machine attention uses torch's operations, which give the same numbers"
        )
    return "eager"
