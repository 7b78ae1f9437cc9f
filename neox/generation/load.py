"""Model runners from a checkpoint of any degrees, or from the modules of a model in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from neox.checkpoint import CheckpointReader
from neox.errors import CheckpointError
from neox.generation.runner import ModelRunner, Stage
from neox.log import get_logger
from neox.model import Embedding, SoftPrompt, build_layer
from neox.model.block import Block
from neox.model.positions import reset_buffers
from neox.ops import DTYPES, PackedWeight, can_pack
from neox.parallel import ColumnParallelLinear, ParallelGrid, RowParallelLinear, copy_to_tensor_ranks
from neox.plan import RunPlan, resolve
from neox.problems import Source, SourceKind

_log = get_logger(__name__)


def plan_for_checkpoint(plan: RunPlan, checkpoint: Path) -> RunPlan:
    """Return the plan with the checkpoint's padded vocabulary, which depends on the degrees it was trained with.

    Raises:
        CheckpointError: If the plan's tensor ranks cannot divide that vocabulary.
    """
    reader = CheckpointReader(checkpoint)
    rows = reader.vocabulary_rows
    if rows == plan.padded_vocab_size:
        return plan
    if rows % plan.grid.tp_size:
        raise CheckpointError(
            f"{checkpoint}: its vocabulary of {rows} rows cannot be divided over "
            f"{plan.config.describe_setting('model_parallel_size')}: use a divisor of {rows}, such as 1"
        )
    config = plan.config.updated({"padded_vocab_size": rows}, source=Source(SourceKind.CHECKPOINT, str(checkpoint)))
    return resolve(config, plan.grid.world_size, plan.vocab_size)


def load_model(
    plan: RunPlan, checkpoint: Path, grid: ParallelGrid, device: torch.device, *, recompute: bool = False
) -> ModelRunner:
    """Load this rank's part of a checkpoint, whatever degrees it was written with.

    Args:
        plan: Plan of the run; the precision is `inference_precision`, else that of training.
        checkpoint: `global_stepN` directory.
        grid: Process groups.
        device: Device of this rank.
        recompute: Compute the whole sequence at each step instead of keeping keys and values.

    Raises:
        CheckpointError: If the checkpoint is broken or belongs to another model.
    """
    plan = plan_for_checkpoint(plan, checkpoint)
    precision = plan.config.generation.inference_precision or plan.precision
    dtype = DTYPES[precision]
    reader = CheckpointReader(checkpoint, plan.layers)
    wanted = set(plan.stages[grid.pp_rank].layers)
    if _has_tied_head(plan, grid):
        wanted.add(0)  # on another stage than the embedding it needs its own copy of the weight
    layers = {
        index: load_layer(plan, reader, index, grid, device, dtype)
        for index in sorted(wanted)
        if plan.layers[index].kind != "identity"
    }
    if grid.rank == 0:
        _log.info("weights of %s in %s on %s", checkpoint, precision, device)
    stage = stage_of_layers(plan, layers, grid)
    if can_pack(device, dtype):
        stage = _pack(plan, stage, layers, grid)
    recorded = device.type == "cuda" and plan.config.generation.cuda_graphs and grid.tp_size == grid.pp_size == 1
    return _runner(plan, stage, grid, device, dtype, recompute, recorded)


def _pack(plan: RunPlan, stage: Stage, layers: Mapping[int, nn.Module], grid: ParallelGrid) -> Stage:
    """Rearrange the weights of all linear layers for faster products, in place; the model can no longer be trained."""
    for layer in layers.values():
        for module in layer.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.multiply = PackedWeight(module.weight)
                module.register_parameter("weight", None)
    if not _has_tied_head(plan, grid):
        return stage
    multiply = PackedWeight(cast(Embedding, layers[0]).word_embeddings.weight)
    return replace(stage, head=lambda hidden: multiply(copy_to_tensor_ranks(hidden, grid), None, None))


def runner_of_layers(
    plan: RunPlan, layers: Mapping[int, nn.Module], grid: ParallelGrid, device: torch.device
) -> ModelRunner:
    """Return a runner of existing modules in evaluation mode, such as a pipeline stage in training.

    Args:
        plan: Plan of the run.
        layers: Index in the layer plan -> module, for the layers of this rank's stage; with a tied head also layer 0
            where the head is.
        grid: Process groups.
        device: Device of the modules.
    """
    stage = stage_of_layers(plan, layers, grid)
    return _runner(plan, stage, grid, device, DTYPES[plan.precision])


def stage_of_layers(plan: RunPlan, layers: Mapping[int, nn.Module], grid: ParallelGrid) -> Stage:
    """Return this rank's layers, sorted by kind."""
    held = plan.stages[grid.pp_rank]
    here = {index: layer for index, layer in layers.items() if held.holds(index)}
    kinds = {plan.layers[index].kind: layer for index, layer in here.items()}
    blocks = [here[index] for index in sorted(here) if plan.layers[index].kind == "block"]
    head: Callable[[Tensor], Tensor] | None = kinds.get("head")
    if _has_tied_head(plan, grid):
        head = cast(Embedding, layers[0]).logits
    return Stage(
        blocks=cast(list[Block], blocks),
        embedding=kinds.get("embedding"),
        norm=kinds.get("norm"),
        head=head,
        prompt=cast(SoftPrompt | None, kinds.get("prompt")),
    )


def runner_of_forward(
    plan: RunPlan, forward: Callable[[Tensor], Tensor], grid: ParallelGrid, device: torch.device
) -> ModelRunner:
    """Return a runner without a cache that only calls `forward`, for a model whose weights ZeRO-3 gathers in its call.

    Args:
        plan: Plan of the run.
        forward: Tokens [B, S] -> logits [B, S, V/tp].
        grid: Process groups.
        device: Device of the model.
    """
    stage = Stage(blocks=(), embedding=lambda tokens, _: forward(tokens), norm=nn.Identity(), head=nn.Identity())
    return _runner(plan, stage, grid, device, DTYPES[plan.precision], recompute=True)


def _has_tied_head(plan: RunPlan, grid: ParallelGrid) -> bool:
    """Return whether this rank's stage holds a head that multiplies by the embedding's weight."""
    head = plan.layers.head
    return head.kind == "head" and head.tied_to is not None and plan.stages[grid.pp_rank].holds(head.index)


def _runner(
    plan: RunPlan,
    stage: Stage,
    grid: ParallelGrid,
    device: torch.device,
    dtype: torch.dtype,
    recompute: bool = False,
    recorded: bool = False,
) -> ModelRunner:
    return ModelRunner(
        stage,
        grid,
        architecture=plan.architecture,
        vocab_size=plan.padded_vocab_size,
        device=device,
        dtype=dtype,
        recompute=recompute,
        recorded=recorded,
    )


def load_layer(
    plan: RunPlan,
    reader: CheckpointReader,
    index: int,
    grid: ParallelGrid,
    device: torch.device,
    dtype: torch.dtype,
) -> nn.Module:
    """Build one layer with the checkpoint's weights for this tensor rank."""
    # On "meta" no initial weights are computed, which the checkpoint's would replace.
    layer = build_layer(plan, index, grid, device="meta", dtype=dtype).to_empty(device=device).eval()
    reset_buffers(layer)
    state = reader.layer_shard(index, grid.tp_rank, grid.tp_size)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(state[name])
    return layer.requires_grad_(False)
