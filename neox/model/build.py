"""Construction of the layers that a run plan names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from neox.architecture import ADAPTER, BLOCK_OFFSET, Architecture, LayerEntry
from neox.config.neox_config import NeoXConfig
from neox.model.blocks import BLOCKS
from neox.model.embedding import Embedding, FinalNorm, Head
from neox.model.encoder import MaskedLMHead, SentenceHead
from neox.model.experts import GroupedLinear
from neox.model.initial_weights import InitialWeights
from neox.model.multi_token import MultiTokenLayer
from neox.model.parameter_marks import mark_parameters
from neox.model.positions import reset_buffers
from neox.model.score_head import ScoreHead
from neox.model.soft_prompt import SoftPrompt
from neox.parallel import (
    ColumnParallelLinear,
    ParallelGrid,
    RowParallelLinear,
    TensorOptions,
    WholeLinear,
    divide_tokens,
)
from neox.plan.run_plan import RunPlan

DRAWN_IN_PIECES = 10**9
"""Least number of parameters whose initial weights are drawn in pieces by all threads of a rank. One thread draws a
billion in four to seven seconds."""


def build_layer(
    plan: RunPlan,
    index: int,
    grid: ParallelGrid,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    loaded: Collection[int] = (),
) -> nn.Module:
    """Build layer `index` of the layer plan with its initial weights; identity layers are `nn.Identity`.

    Args:
        plan: Plan of the run.
        index: Number of the layer.
        grid: Process groups.
        device: Device of the parameters. "meta" makes shapes without memory, which `initialize` fills after `to_empty`.
        dtype: Type of the parameters; fp32 if None (the rotary buffer always is).
        loaded: Layers whose weights are read from a checkpoint next. Only their adapters, which it may lack, are drawn.
    """
    entry = plan.layers[index]
    network = plan.architecture
    vocab = plan.layers.padded_vocab_size
    options: TensorOptions = {"device": device, "dtype": dtype}
    layer: nn.Module
    if entry.kind == "identity":
        return nn.Identity()
    if entry.kind == "embedding":
        layer = Embedding(network, vocab, grid, dropout=plan.config.training.hidden_dropout, **options)
        divide_tokens(layer)
    elif entry.kind == "prompt":
        layer = SoftPrompt(network.soft_prompt_tokens, network.hidden_size, **options)
    elif entry.kind == "block":
        number = index - BLOCK_OFFSET
        layer = BLOCKS[network.attention[number]](plan, number, grid, **options)
        _add_adapters(layer, plan, index)
        divide_tokens(layer)
    elif entry.kind == "multi_token":
        layer = MultiTokenLayer(plan, grid, **options)
        _add_adapters(layer, plan, index)
        divide_tokens(layer)
    elif entry.kind == "norm":
        layer = FinalNorm(network, **options)
    elif entry.tied_to is not None and entry.kind == "head":
        return nn.Identity()  # the embedding is the head
    else:
        layer = _head(plan, entry, grid, options)
    if device is None or torch.device(device).type != "meta":
        initialize(layer, plan, index, grid, is_loaded=index in loaded)
    return layer


def _head(plan: RunPlan, entry: LayerEntry, grid: ParallelGrid, options: TensorOptions) -> nn.Module:
    """Build the head: for logits, scores, masked tokens or sentence pairs."""
    network = plan.architecture
    vocab = plan.layers.padded_vocab_size
    if entry.kind == "masked_lm_head":
        return MaskedLMHead(network, vocab, grid, **options)
    if entry.kind == "sentence_head":
        return SentenceHead(network, **options)
    if entry.kind == "score_head":
        return ScoreHead(network.hidden_size, grid, **options)
    return Head(
        network.hidden_size,
        vocab,
        grid,
        parallelism=plan.config.model.output_layer_parallelism,
        bias=network.head_bias,
        softcap=network.logit_softcap,
        **options,
    )


def _add_adapters(layer: nn.Module, plan: RunPlan, index: int) -> None:
    """Add the adapters that the layer plan lists to the linear layers of a block, or of multi-token prediction."""
    lora = plan.layers.lora
    keys = plan.config.training.lora
    if lora is None or keys is None:
        return
    for spec in plan.layers[index].parameters:
        module, found, name = spec.name.partition(ADAPTER)
        if found and name == "lora_A":
            linear = layer.get_submodule(module)
            if isinstance(linear, GroupedLinear):
                linear.add_adapter(lora.rank, lora.scale)
                continue
            assert isinstance(linear, ColumnParallelLinear | RowParallelLinear | WholeLinear), module
            linear.add_adapter(lora.rank, lora.scale, keys.dropout)


def initialize(layer: nn.Module, plan: RunPlan, index: int, grid: ParallelGrid, *, is_loaded: bool = False) -> None:
    """Prepare a layer that has memory for training: marks, initial weights and buffers.

    The initial weights are slices of the same full tensors under every layout of ranks. With `is_loaded` only adapters
    get theirs.
    """
    entry = plan.layers[index]
    weights = drawn_weights(plan)
    mark_parameters(layer, entry, grid, width_multiplier=weights.width_multiplier)
    weights.fill(layer, entry, grid, only_adapters=is_loaded)
    reset_buffers(layer)


def drawn_weights(plan: RunPlan) -> InitialWeights:
    """Return how a run's weights are drawn."""
    weights = initial_weights(plan.config, plan.architecture)
    return replace(weights, in_pieces=plan.layers.numel >= DRAWN_IN_PIECES)


def initial_weights(config: NeoXConfig, architecture: Architecture) -> InitialWeights:
    """Return how a configuration's weights are drawn."""
    model = config.model
    optimizer = config.optimizer
    hidden = architecture.hidden_size
    settings = InitialWeights(
        seed=config.training.seed,
        init_method=model.init_method,
        output_layer_init_method=model.output_layer_init_method,
        std=model.init_method_std,
        layers=architecture.num_layers,
        hidden=hidden,
        width_multiplier=optimizer.width_multiplier(hidden),
    )
    if optimizer.use_mup:
        settings = replace(settings, scale=optimizer.mup_init_scale)
    if model.soft_prompt_tuning:
        settings = replace(settings, prompt_range=model.soft_prompt_tuning.init_range)
    return settings
