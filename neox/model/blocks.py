"""Table of blocks as modules, by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Unpack

from neox.architecture import BLOCKS as BLOCKS_ON_PAPER
from neox.architecture import SPARSITY
from neox.log import get_logger
from neox.model.attention import SelfAttention, SparseSelfAttention, WindowedSelfAttention
from neox.model.block import Block, MixerLayer, TransformerLayer
from neox.model.gated_delta import GatedDeltaMixer
from neox.model.gmlp import GatedMLPLayer
from neox.model.latent_attention import LatentSelfAttention
from neox.model.mamba import MambaMixer
from neox.model.mamba2 import Mamba2Mixer
from neox.model.mixer import Mixer
from neox.model.rwkv import RWKVLayer
from neox.ops import AttentionImpl, machine_has_fast_path
from neox.parallel import ParallelGrid, TensorOptions
from neox.plan.run_plan import RunPlan


def _with_mlp(
    mixer: SelfAttention | Mixer, plan: RunPlan, number: int, grid: ParallelGrid, **options: Unpack[TensorOptions]
) -> Block:
    """Build a block of attention, or a mixer in its place, and an MLP."""
    training = plan.config.training
    return TransformerLayer(
        plan.architecture,
        number,
        grid,
        mixer=mixer,
        hidden_dropout=training.hidden_dropout,
        tile_size=training.mlp_tile_size,
        **options,
    )


def _recurrent(mixer: Callable[..., Mixer]) -> Callable[..., Block]:
    """Return the constructor of a block with a recurrent mixer, with the second sublayer that its row names.

    Args:
        mixer: Constructor of the mixer (network, grid, device=, dtype=).
    """

    def build(plan: RunPlan, number: int, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> Block:
        network = plan.architecture
        module = mixer(network, grid, **options)
        if BLOCKS_ON_PAPER[network.attention[number]].two_sublayers:
            return _with_mlp(module, plan, number, grid, **options)
        dropout = plan.config.training.hidden_dropout
        return MixerLayer(network, grid, mixer=module, hidden_dropout=dropout, **options)

    return build


def _transformer(attention: type[SelfAttention]) -> Callable[..., Block]:
    """Return the constructor of a block with attention and an MLP."""

    def build(plan: RunPlan, number: int, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> Block:
        training = plan.config.training
        module = attention(
            plan.architecture,
            number,
            grid,
            impl=_attention_impl(plan, number),
            dropout=training.attention_dropout,
            layer_scaling=plan.config.model.apply_query_key_layer_scaling,
            **options,
        )
        part = training.recomputed_part(number)
        if part != "full":  # `Stage` recomputes whole blocks
            module.recompute = part
        return _with_mlp(module, plan, number, grid, **options)

    return build


def _gated(plan: RunPlan, number: int, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> Block:
    """Build a block with a gate over positions."""
    return GatedMLPLayer(plan.architecture, number, grid, **options)


def _rwkv(plan: RunPlan, number: int, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> Block:
    """Build a block of time mixing and channel mixing."""
    dropout = plan.config.training.hidden_dropout
    return RWKVLayer(plan.architecture, number, grid, hidden_dropout=dropout, **options)


BLOCKS: Mapping[str, Callable[..., Block]] = MappingProxyType(
    {
        "global": _transformer(SelfAttention),
        "sliding_window": _transformer(WindowedSelfAttention),
        "latent": _transformer(LatentSelfAttention),
        **dict.fromkeys(SPARSITY, _transformer(SparseSelfAttention)),
        "gmlp": _gated,
        "amlp": _gated,
        "mamba": _recurrent(MambaMixer),
        "gated_delta": _recurrent(GatedDeltaMixer),
        **dict.fromkeys(("mamba2", "mamba2_mlp"), _recurrent(Mamba2Mixer)),
        "rwkv": _rwkv,
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
