"""From a configuration and a checkpoint of any degrees to a model that can be run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from neox.checkpoint import CheckpointReader
from neox.config import NeoXConfig, RunPlan, resolve
from neox.generation.blocks import Blocks, ModuleBlocks
from neox.generation.merged import MergedBlocks, can_merge
from neox.generation.packed import PackedWeight, can_pack, pack_layers
from neox.generation.request import context_length
from neox.generation.runner import ModelRunner, Stage
from neox.log import get_logger
from neox.model import TransformerLayer, build_layer, tied_logits
from neox.model.attention import RotaryEmbedding
from neox.parallel import ParallelGrid

_log = get_logger(__name__)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def plan_for_checkpoint(plan: RunPlan, checkpoint: Path) -> RunPlan:
    """Return the plan with the checkpoint's padded vocabulary, which depends on the degrees it was trained with."""
    reader = CheckpointReader(checkpoint)
    rows = sum(part.shape[0] for part in reader.parts(0, "word_embeddings.weight"))
    if rows == plan.padded_vocab_size:
        return plan
    flat = {**plan.config.to_flat(), "padded_vocab_size": rows}
    sources = {**plan.config.sources(), "padded_vocab_size": str(checkpoint)}
    return resolve(NeoXConfig.from_flat(flat, sources), plan.grid.world_size, plan.vocab_size)


def load_model(
    plan: RunPlan, checkpoint: Path, grid: ParallelGrid, device: torch.device, *, recompute: bool = False
) -> ModelRunner:
    """Load this rank's part of a checkpoint, whatever degrees it was written with.

    Its precision is `inference_precision`, else that of training.

    Raises CheckpointError for a checkpoint that is broken or of another model.
    """
    plan = plan_for_checkpoint(plan, checkpoint)
    precision = plan.config.generation.inference_precision or plan.precision
    dtype = _DTYPES[precision]
    reader = CheckpointReader(checkpoint, plan.layers)
    bounds = plan.stages[grid.pp_rank]
    wanted = set(range(bounds.first, bounds.last))
    if _has_tied_head(plan, grid):
        wanted.add(0)  # on another stage than the embedding it needs its own copy of the weight
    layers = {
        index: load_layer(plan, reader, index, grid, device, dtype)
        for index in sorted(wanted)
        if plan.layers[index].kind != "identity"
    }
    if grid.rank == 0:
        _log.info("weights of %s in %s on %s", checkpoint, precision, device)
    if can_pack(device, dtype):
        stage = _packed_stage(plan, layers, grid, device, dtype)
    else:
        stage = stage_of_layers(plan, layers, grid, _module_blocks(plan, layers, device, dtype))
    return _runner(plan, stage, grid, device, dtype, recompute)


def _packed_stage(
    plan: RunPlan, layers: dict[int, nn.Module], grid: ParallelGrid, device: torch.device, dtype: torch.dtype
) -> Stage:
    """Rearrange the weights for reading. Takes blocks out of `layers` as it goes, so that their rows are freed."""
    blocks: Blocks
    if can_merge(_blocks(plan, layers), dtype):
        indices = [index for index in sorted(layers) if plan.layers[index].kind == "block"]
        blocks = MergedBlocks((layers.pop(index) for index in indices), context_length(plan.config))
    else:
        blocks = _module_blocks(plan, layers, device, dtype)
    pack_layers(layers.values())
    stage = stage_of_layers(plan, layers, grid, blocks)
    if _has_tied_head(plan, grid):
        stage = replace(stage, head=partial(PackedWeight(layers[0].word_embeddings.weight), weight=None, bias=None))
    return _bare_ends(plan, layers, stage) if grid.tp_size == 1 else stage


def _bare_ends(plan: RunPlan, layers: Mapping[int, nn.Module], stage: Stage) -> Stage:
    """Replace modules by the functions in them: in a step whose weights have emptied the caches, a module's calls take
    ten microseconds and more."""
    kinds = {plan.layers[index].kind: layer for index, layer in layers.items()}
    if stage.embedding is not None:
        stage = replace(stage, embedding=partial(torch.embedding, kinds["embedding"].word_embeddings.weight))
    if stage.norm is not None:
        norm = kinds["norm"].norm
        shape, weight, bias = norm.normalized_shape, norm.weight, norm.bias
        stage = replace(
            stage, norm=partial(torch.layer_norm, normalized_shape=shape, weight=weight, bias=bias, eps=norm.eps)
        )
    if stage.head is not None and not plan.layers.tied:
        stage = replace(stage, head=partial(kinds["head"].final_linear.multiply, weight=None, bias=None))
    return stage


def runner_of_layers(
    plan: RunPlan, layers: Mapping[int, nn.Module], grid: ParallelGrid, device: torch.device
) -> ModelRunner:
    """Return a runner of modules that exist already, such as a pipeline stage in training (put them in eval mode).

    layers: by index in the layer plan, those of this rank's stage; with a tied head also layer 0 where the head is.
    """
    dtype = _DTYPES[plan.precision]
    stage = stage_of_layers(plan, layers, grid, _module_blocks(plan, layers, device, dtype))
    return _runner(plan, stage, grid, device, dtype)


def stage_of_layers(plan: RunPlan, layers: Mapping[int, nn.Module], grid: ParallelGrid, blocks: Blocks) -> Stage:
    """Sort this rank's other layers by what they do."""
    bounds = plan.stages[grid.pp_rank]
    here = {plan.layers[index].kind: layer for index, layer in layers.items() if bounds.first <= index < bounds.last}
    head: Callable[[Tensor], Tensor] | None = here.get("head")
    if _has_tied_head(plan, grid):
        head = partial(_tied_head, layers[0], grid)
    return Stage(blocks=blocks, embedding=here.get("embedding"), norm=here.get("norm"), head=head)


def runner_of_forward(
    plan: RunPlan, forward: Callable[[Tensor], Tensor], grid: ParallelGrid, device: torch.device
) -> ModelRunner:
    """Return a runner that only ever calls `forward`, tokens [B, S] -> logits [B, S, V/tp]: for a model whose weights
    are gathered when it is called (ZeRO-3). It has no cache."""
    blocks = ModuleBlocks((), context_length(plan.config), device, _DTYPES[plan.precision])
    stage = Stage(blocks=blocks, embedding=forward, norm=nn.Identity(), head=nn.Identity())
    return _runner(plan, stage, grid, device, _DTYPES[plan.precision], recompute=True)


def _blocks(plan: RunPlan, layers: Mapping[int, nn.Module]) -> list[TransformerLayer]:
    return [layers[index] for index in sorted(layers) if plan.layers[index].kind == "block"]


def _module_blocks(
    plan: RunPlan, layers: Mapping[int, nn.Module], device: torch.device, dtype: torch.dtype
) -> ModuleBlocks:
    return ModuleBlocks(_blocks(plan, layers), context_length(plan.config), device, dtype)


def _has_tied_head(plan: RunPlan, grid: ParallelGrid) -> bool:
    """Whether this rank's stage ends with a head that multiplies by the embedding's weight."""
    return plan.layers.tied and plan.layers[plan.stages[grid.pp_rank].last - 1].kind == "head"


def _runner(
    plan: RunPlan,
    stage: Stage,
    grid: ParallelGrid,
    device: torch.device,
    dtype: torch.dtype,
    recompute: bool = False,
) -> ModelRunner:
    return ModelRunner(
        stage,
        grid,
        hidden_size=plan.layers.hidden_size,
        vocab_size=plan.padded_vocab_size,
        max_length=context_length(plan.config),
        device=device,
        dtype=dtype,
        recompute=recompute,
    )


def _tied_head(embedding: nn.Module, grid: ParallelGrid, hidden: Tensor) -> Tensor:
    return tied_logits(hidden, embedding.word_embeddings.weight, grid)


def load_layer(
    plan: RunPlan,
    reader: CheckpointReader,
    index: int,
    grid: ParallelGrid,
    device: torch.device,
    dtype: torch.dtype,
) -> nn.Module:
    """Build one layer with the checkpoint's weights for this tensor rank."""
    # On "meta" no memory is filled with initial weights that would be thrown away.
    layer = build_layer(plan, index, grid, device="meta", dtype=dtype).to_empty(device=device).eval()
    for module in layer.modules():
        if isinstance(module, RotaryEmbedding):
            module.reset()
    state = reader.layer_shard(index, grid.tp_rank, grid.tp_size)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(state[name])
    return layer.requires_grad_(False)
