"""Model runners from a checkpoint of any degrees, or from the modules of a model in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from neox.checkpoint import CheckpointReader
from neox.errors import CheckpointError
from neox.generation.runner import CalledNetwork, ModelRunner
from neox.log import get_logger
from neox.model import Embedding, Stage, build_layer
from neox.model.positions import reset_buffers
from neox.ops import DTYPES, PackedWeight, can_pack, has_fast_path
from neox.parallel import ColumnParallelLinear, ParallelGrid, RowParallelLinear
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
    keys = plan.config.checkpoint
    reader = CheckpointReader(checkpoint, plan.layers, weights=keys.load_weights, gpt_neox_date=keys.gpt_neox_date)
    stage_plan = plan.stages[grid.pp_rank]
    wanted = set(stage_plan.layers)
    head = plan.layers.head
    has_tied_head = head.tied_to is not None and stage_plan.holds(head.index)
    if has_tied_head:
        wanted.add(0)  # on another stage than the embedding, the head needs its own copy of the weight
    layers = {
        index: load_layer(plan, reader, index, grid, device, dtype)
        for index in sorted(wanted)
        if plan.layers[index].kind not in ("identity", "multi_token")
    }
    reader.note_averages()
    if grid.rank == 0:
        kind = "averaged weights" if plan.config.checkpoint.load_weights == "ema" else "weights"
        _log.info("%s of %s in %s on %s", kind, checkpoint, precision, device)
    if can_pack(device, dtype):
        _pack(layers)
        if has_tied_head:
            _pack_tied_head(cast(Embedding, layers[0]))
    stage = Stage(plan, grid, layers, stage_plan.ranges)
    on_one_gpu = has_fast_path("recorded_steps", device) and grid.tp_size == grid.pp_size == 1
    # The host reads how many tokens each expert has, which a recorded graph cannot repeat.
    can_record = on_one_gpu and not plan.architecture.num_experts
    recorded = can_record and plan.config.generation.cuda_graphs
    return _runner(plan, stage, grid, device, dtype, recompute, recorded)


def _pack(layers: Mapping[int, nn.Module]) -> None:
    """Rearrange the weights of all linear layers for faster products, in place; the model can no longer be trained."""
    for layer in layers.values():
        for module in layer.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.multiply = PackedWeight(module.weight)
                module.register_parameter("weight", None)


def _pack_tied_head(embedding: Embedding) -> None:
    """Let a tied head multiply by a rearranged copy of the words' vectors."""
    embedding.multiply = PackedWeight(embedding.word_embeddings.weight)


def runner_of_stage(plan: RunPlan, stage: Stage, grid: ParallelGrid, device: torch.device) -> ModelRunner:
    """Return a runner of a model in training.

    Args:
        plan: Plan of the run.
        stage: The layers of this rank, in evaluation mode.
        grid: Process groups.
        device: Device of the modules.
    """
    return _runner(plan, stage, grid, device, DTYPES[plan.precision])


def runner_of_forward(
    plan: RunPlan, forward: Callable[[Tensor], Tensor], grid: ParallelGrid, device: torch.device
) -> ModelRunner:
    """Return a runner without a cache that only calls `forward`, for a model whose weights ZeRO 3 gathers in its call.

    Args:
        plan: Plan of the run.
        forward: Tokens [B, S] -> logits [B, S, V/tp].
        grid: Process groups.
        device: Device of the model.
    """
    return _runner(plan, CalledNetwork(forward), grid, device, DTYPES[plan.precision], recompute=True)


def _runner(
    plan: RunPlan,
    network: Stage | CalledNetwork,
    grid: ParallelGrid,
    device: torch.device,
    dtype: torch.dtype,
    recompute: bool = False,
    recorded: bool = False,
) -> ModelRunner:
    return ModelRunner(
        network,
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
