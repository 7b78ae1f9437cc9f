"""From the run plan to modules: the only place of this room that knows configurations exist."""

from __future__ import annotations

import torch
from torch import nn

from neox.config.plan import RunPlan
from neox.log import get_logger
from neox.model.attention import SelfAttention
from neox.model.block import MLP, TransformerLayer
from neox.model.ends import Embedding, FinalNorm, Head, TiedHead
from neox.model.initial_weights import initialize_layer
from neox.ops import AttentionImpl
from neox.parallel import ParallelGrid

_FIRST_BLOCK = 2


def build_layer(
    plan: RunPlan,
    index: int,
    grid: ParallelGrid,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Build layer `index` of the layer plan with its initial weights; identity layers are `nn.Identity`.

    device: "meta" makes shapes without memory; `initialize` fills them after `to_empty`. dtype: of parameters, fp32 if
    None (the rotary buffer always is).
    """
    entry = plan.layers[index]
    hidden, vocab = plan.layers.hidden_size, plan.layers.padded_vocab_size
    model = plan.config.model
    where = {"device": device, "dtype": dtype}
    layer: nn.Module
    if entry.kind == "identity":
        return nn.Identity()
    if entry.kind == "embedding":
        layer = Embedding(vocab, hidden, grid, dropout=plan.config.training.hidden_dropout, **where)
    elif entry.kind == "block":
        layer = _build_block(plan, index - _FIRST_BLOCK, grid, device=device, dtype=dtype)
    elif entry.kind == "norm":
        layer = FinalNorm(hidden, layernorm_epsilon=model.layernorm_epsilon, **where)
    elif entry.tied_to is not None:
        layer = TiedHead(grid)
    else:
        layer = Head(hidden, vocab, grid, parallelism=model.output_layer_parallelism, **where)
    if device is None or torch.device(device).type != "meta":
        initialize(layer, plan, index, grid)
    return layer


def initialize(layer: nn.Module, plan: RunPlan, index: int, grid: ParallelGrid) -> None:
    """Give a layer its initial weights, the same full tensors under every layout of ranks."""
    model = plan.config.model
    initialize_layer(
        layer,
        plan.layers[index],
        grid,
        seed=plan.config.training.seed,
        init_method=model.init_method,
        output_layer_init_method=model.output_layer_init_method,
        std=model.init_method_std,
        layers=plan.layers.num_layers,
        hidden=plan.layers.hidden_size,
    )


def _build_block(
    plan: RunPlan, block: int, grid: ParallelGrid, *, device: torch.device | str | None, dtype: torch.dtype | None
) -> TransformerLayer:
    """Build block number `block`, counted from 0."""
    model, training = plan.config.model, plan.config.training
    hidden, heads = plan.layers.hidden_size, plan.layers.num_attention_heads
    rotary_ndims = int(hidden // heads * model.rotary_pct) if model.pos_emb == "rotary" else 0
    attention = SelfAttention(
        hidden,
        heads,
        grid,
        impl=_attention_impl(plan, block),
        rotary_ndims=rotary_ndims,
        rotary_base=model.rotary_emb_base,
        dropout=training.attention_dropout,
        layer_scaling=block + 1 if model.apply_query_key_layer_scaling else 1,
        device=device,
        dtype=dtype,
    )
    mlp = MLP(hidden, grid, tanh_gelu=model.bias_gelu_fusion, device=device, dtype=dtype)
    return TransformerLayer(
        attention,
        mlp,
        hidden,
        grid,
        parallel_residual=model.gpt_j_residual,
        hidden_dropout=training.hidden_dropout,
        layernorm_epsilon=model.layernorm_epsilon,
        device=device,
        dtype=dtype,
    )


def _attention_impl(plan: RunPlan, block: int) -> AttentionImpl:
    """Return a block's attention; the fused kernel asked for without a GPU becomes torch's operations, said aloud once.

    By what the machine has, not by where the layer is built: weights may be made on a CPU, or on meta, and moved.
    """
    wanted = plan.attention[block]
    if wanted != "fused" or torch.cuda.is_available():
        return wanted
    if block == 0:
        get_logger(__name__).warning(
            "scaled_upper_triang_masked_softmax_fusion: the fused kernel needs a GPU; "
            "on this machine attention uses torch's operations, which give the same numbers"
        )
    return "eager"
