"""Taking up an optimizer's state that was saved with other degrees, another ZeRO stage or another precision.

Whatever wrapper DeepSpeed puts around it, the AdamW inside moves fp32 tensors: whole parameters, fp32 copies of them,
or flat partitions. Each is a `Slot` here, with the pieces of parameters that lie in it; filling every slot from the
checkpoint's parameters is all there is to loading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from neox.checkpoint import OptimizerReader
from neox.config import LayerPlan
from neox.engine.engine import Engine
from neox.engine.weights import fill_layer, weight_layers
from neox.errors import CheckpointError
from neox.log import get_logger
from neox.optim import parameter_groups
from neox.parallel import ParallelGrid

_log = get_logger(__name__)


@dataclass(frozen=True)
class Piece:
    """Elements [first, first + length) of a parameter (of this tensor rank, flattened), at `start` in its slot."""

    index: int
    name: str
    first: int
    length: int
    start: int


@dataclass(frozen=True)
class Slot:
    """An fp32 tensor that AdamW moves, and what lies in it; elements that no piece covers are padding."""

    tensor: Tensor
    pieces: tuple[Piece, ...]


def optimizer_order(model: nn.Module) -> list[list[tuple[int, str]]]:
    """(layer index, name) of every parameter in the optimizer's groups, in its order: kept in checkpoints, because
    without ZeRO DeepSpeed numbers parameters instead of naming them."""
    names = _names(model)
    return [[names[id(p)] for p in group["params"]] for group in parameter_groups(model.named_parameters(), 0.0)]


def read_weights_fp32(model: nn.Module, layers: LayerPlan, grid: ParallelGrid, path: Path) -> None:
    """Fill this rank's layers from the optimizer's fp32 weights: for a run in another precision than the saved one."""
    reader = OptimizerReader(path, layers)
    for index, layer in weight_layers(model):
        names = [name for name, _ in layer.named_parameters()]
        fill_layer(layer, {name: reader.shard(index, name, "fp32", grid.tp_rank, grid.tp_size) for name in names})


@torch.no_grad()
def read_optimizer_any(engine: Engine, path: Path) -> None:
    """Fill this rank's optimizer, loss scaler, counters and schedule from a checkpoint of any degrees.

    Raises CheckpointError when the checkpoint lacks something; no collectives take place.
    """
    grid = engine.grid
    reader = OptimizerReader(path, engine.plan.layers)
    for slot in optimizer_slots(engine):
        state: dict[str, Tensor] = {
            "step": torch.tensor(reader.step, dtype=torch.float32, device=slot.tensor.device),
            "exp_avg": torch.zeros_like(slot.tensor),
            "exp_avg_sq": torch.zeros_like(slot.tensor),
        }
        targets = {"fp32": slot.tensor, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        for piece in slot.pieces:
            for kind, target in targets.items():
                values = reader.shard(piece.index, piece.name, kind, grid.tp_rank, grid.tp_size).reshape(-1)
                part = values[piece.first : piece.first + piece.length]
                target.view(-1)[piece.start : piece.start + piece.length].copy_(part)
        engine.adamw.state[slot.tensor] = state
    _restore_scaler(engine, reader)
    client, body = reader.client_state, engine.body
    body.global_steps, body.global_samples = client["global_steps"], client["global_samples"]
    body.skipped_steps = client["skipped_steps"]
    engine.schedule.load_state_dict(client["lr_scheduler"])


def optimizer_slots(engine: Engine) -> Iterator[Slot]:
    """The tensors that AdamW moves on this rank. Raises CheckpointError for a wrapper that is not known here."""
    wrapper, names = engine.body.optimizer, _names(engine.body.module)
    groups = parameter_groups(engine.body.module.named_parameters(), 0.0)
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        yield from _stage3_slots(wrapper, engine.grid, names)
    elif isinstance(wrapper, DeepSpeedZeroOptimizer | BF16_Optimizer):
        for number, (group, inner) in enumerate(zip(groups, engine.adamw.param_groups, strict=True)):
            yield _flat_slot(number, group["params"], inner["params"], names)
    elif wrapper is engine.adamw or isinstance(wrapper, FP16_UnfusedOptimizer):
        for group, inner in zip(groups, engine.adamw.param_groups, strict=True):
            for parameter, tensor in zip(group["params"], inner["params"], strict=True):
                yield Slot(tensor, (Piece(*names[id(parameter)], 0, parameter.numel(), 0),))
    else:
        raise CheckpointError(
            f"the optimizer's state cannot be loaded into {type(wrapper).__name__} from another layout; "
            "load it with the layout it was saved with, or set no_load_optim"
        )


def _flat_slot(number: int, parameters: list[nn.Parameter], tensors: list[Tensor], names: dict[int, Any]) -> Slot:
    """One group's flat partition. DeepSpeed links each parameter that has a part in it to that part."""
    assert len(tensors) == 1, f"group {number} has {len(tensors)} flat partitions"
    pieces = []
    for parameter in parameters:
        link = getattr(parameter, "_hp_mapping", None)
        if link is not None:
            source, target = link.lp_fragment_address, link.hp_fragment_address
            pieces.append(Piece(*names[id(parameter)], source.start, source.numel, target.start))
    return Slot(tensors[0], tuple(pieces))


def _stage3_slots(wrapper: Any, grid: ParallelGrid, names: dict[int, Any]) -> Iterator[Slot]:
    """ZeRO 3: sub-groups of parameters, of each of which this data rank holds an equal (padded) part."""
    for tensor, parameters in zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True):
        if tensor.numel() == 0:
            raise CheckpointError(
                "the optimizer's state is offloaded to NVMe; load it with the layout it was saved with"
            )
        pieces, start = [], 0
        for parameter in parameters:
            part = parameter.partition_numel()
            first = grid.dp_rank * part
            length = max(0, min(part, parameter.ds_numel - first))
            pieces.append(Piece(*names[id(parameter)], first, length, start))
            start += part
        yield Slot(tensor, tuple(pieces))


def _names(model: nn.Module) -> dict[int, tuple[int, str]]:
    return {id(p): (index, name) for index, layer in weight_layers(model) for name, p in layer.named_parameters()}


def _restore_scaler(engine: Engine, reader: OptimizerReader) -> None:
    if engine.plan.precision != "fp16":
        return
    if reader.scaler is None:
        _log.info("the checkpoint has no loss scale (saved in %s): it starts anew", reader.layout["precision"])
        return
    wrapper = engine.body.optimizer
    target = wrapper.loss_scale_config if isinstance(wrapper, FP16_UnfusedOptimizer) else wrapper.loss_scaler
    for name, value in reader.scaler.items():
        if hasattr(target, name):
            setattr(target, name, value)
