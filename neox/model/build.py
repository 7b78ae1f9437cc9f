"""Construction of the layers that a run plan names."""

from __future__ import annotations

import torch
from torch import nn

from neox.architecture import ADAPTER, BLOCK_OFFSET, GATED_KINDS
from neox.log import get_logger
from neox.model.block import Block, TransformerLayer
from neox.model.embedding import Embedding, FinalNorm, Head
from neox.model.encoder import MaskedLMHead, SentenceHead
from neox.model.gmlp import GatedMLPLayer
from neox.model.initial_weights import initialize_layer
from neox.model.soft_prompt import SoftPrompt
from neox.ops import AttentionImpl
from neox.parallel import (
    ColumnParallelLinear,
    ParallelGrid,
    RowParallelLinear,
    TensorOptions,
    divide_tokens,
)
from neox.plan.run_plan import RunPlan

DRAWN_ON_DEVICE = 10**9
"""Parameters from which on initial weights are drawn on their device: a CPU core draws a billion in ten seconds."""


def build_layer(
    plan: RunPlan,
    index: int,
    grid: ParallelGrid,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Build layer `index` of the layer plan with its initial weights; identity layers are `nn.Identity`.

    Args:
        plan: Plan of the run.
        index: Of the layer.
        grid: Process groups.
        device: Device of the parameters. "meta" makes shapes without memory; `initialize` fills them after `to_empty`.
        dtype: Type of the parameters; fp32 if None (the rotary buffer always is).
    """
    entry = plan.layers[index]
    network, training, vocab = plan.architecture, plan.config.training, plan.layers.padded_vocab_size
    options: TensorOptions = {"device": device, "dtype": dtype}
    layer: nn.Module
    if entry.kind == "identity":
        return nn.Identity()
    if entry.kind == "embedding":
        layer = Embedding(network, vocab, grid, dropout=training.hidden_dropout, **options)
        divide_tokens(layer)
    elif entry.kind == "prompt":
        layer = SoftPrompt(network.soft_prompt_tokens, network.hidden_size, **options)
    elif entry.kind == "block":
        layer = _block(plan, index - BLOCK_OFFSET, grid, options)
        _add_adapters(layer, plan, index)
        divide_tokens(layer)
    elif entry.kind == "norm":
        layer = FinalNorm(network, **options)
    elif entry.kind == "masked_lm_head":
        layer = MaskedLMHead(network, vocab, grid, **options)
    elif entry.kind == "sentence_head":
        layer = SentenceHead(network, **options)
    elif entry.tied_to is not None:
        return nn.Identity()  # the embedding is the head
    else:
        parallelism = plan.config.model.output_layer_parallelism
        layer = Head(network.hidden_size, vocab, grid, parallelism=parallelism, bias=network.head_bias, **options)
    if device is None or torch.device(device).type != "meta":
        initialize(layer, plan, index, grid)
    return layer


def _block(plan: RunPlan, number: int, grid: ParallelGrid, options: TensorOptions) -> Block:
    network = plan.architecture
    training = plan.config.training
    if network.attention[number] in GATED_KINDS:
        return GatedMLPLayer(network, number, grid, **options)
    block = TransformerLayer(
        network,
        number,
        grid,
        impl=_attention_impl(plan, number),
        attention_dropout=training.attention_dropout,
        hidden_dropout=training.hidden_dropout,
        layer_scaling=plan.config.model.apply_query_key_layer_scaling,
        **options,
    )
    part = training.recomputed_part(number)
    if part != "full":  # `Stage` recomputes whole blocks
        block.attention.recompute = part
    return block


def _add_adapters(layer: nn.Module, plan: RunPlan, index: int) -> None:
    """Add the adapters that the layer plan lists to the linear layers of a block."""
    lora, keys = plan.layers.lora, plan.config.training.lora
    for spec in plan.layers[index].parameters if lora and keys else ():
        module, found, name = spec.name.partition(ADAPTER)
        if found and name == "lora_A" and lora and keys:
            linear = layer.get_submodule(module)
            assert isinstance(linear, ColumnParallelLinear | RowParallelLinear), module
            linear.add_adapter(lora.rank, lora.scale, keys.dropout)


def initialize(layer: nn.Module, plan: RunPlan, index: int, grid: ParallelGrid) -> None:
    """Give a layer its initial weights, the same full tensors under every layout of ranks."""
    model = plan.config.model
    prompt = model.soft_prompt_tuning
    initialize_layer(
        layer,
        plan.layers[index],
        grid,
        seed=plan.config.training.seed,
        init_method=model.init_method,
        output_layer_init_method=model.output_layer_init_method,
        std=model.init_method_std,
        layers=plan.architecture.num_layers,
        hidden=plan.architecture.hidden_size,
        width_multiplier=plan.config.optimizer.width_multiplier(plan.architecture.hidden_size),
        scale=plan.config.optimizer.mup_init_scale if plan.config.optimizer.use_mup else 1.0,
        prompt_range=prompt.init_range if prompt else 0.0,
        on_device=plan.layers.numel >= DRAWN_ON_DEVICE,
    )


def _attention_impl(plan: RunPlan, block: int) -> AttentionImpl:
    """Return a block's attention: torch's operations instead of the fused kernel without a GPU, with one warning.

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
