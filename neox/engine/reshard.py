"""Loading an optimizer's state that was saved with other parallel degrees, another ZeRO stage or another precision.

Whatever wrapper DeepSpeed puts around it, the optimizer inside updates fp32 tensors: whole parameters, fp32 copies of
them, or flat partitions. Each is an `OptimizerTensor` here, with the parts of parameters that it holds; to load is to
fill every one of them from the checkpoint's parameters.
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

from neox.architecture import LayerPlan
from neox.checkpoint import CheckpointReader, OptimizerReader
from neox.checkpoint.optimizer_formats import FP32
from neox.config import RunPlan
from neox.engine.engine import Engine
from neox.engine.weights import fill_layer, weight_layers
from neox.errors import CheckpointError
from neox.log import get_logger
from neox.optim import planned_groups
from neox.parallel import ParallelGrid

_log = get_logger(__name__)
Names = dict[int, tuple[int, str]]
"""id of a parameter -> its layer's index and its name in the layer."""


@dataclass(frozen=True)
class Fragment:
    """A part of a flattened parameter on this tensor rank.

    Attributes:
        index: Index of the layer.
        name: Name of the parameter in its layer.
        first: First element of the parameter.
        length: Number of elements.
        start: Position of the first element in the optimizer's tensor.
    """

    index: int
    name: str
    first: int
    length: int
    start: int


@dataclass(frozen=True)
class OptimizerTensor:
    """An fp32 tensor of the optimizer, and the fragments in it; elements that no fragment covers are padding."""

    tensor: Tensor
    fragments: tuple[Fragment, ...]


def optimizer_order(model: nn.Module, plan: RunPlan) -> list[list[tuple[int, str]]]:
    """Return (layer index, name) of every parameter, by optimizer group, in the optimizer's order.

    Checkpoints store it, because without ZeRO DeepSpeed numbers parameters and does not name them.
    """
    names = _names(model, plan.layers)
    return [[names[id(p)] for p in group["params"]] for group in planned_groups(plan, model.named_parameters())]


def read_weights_fp32(model: nn.Module, layers: LayerPlan, grid: ParallelGrid, path: Path) -> None:
    """Fill this rank's layers from the optimizer's fp32 weights: for a run in another precision than the saved one.

    Frozen weights, which the optimizer does not have, come from the layer files.
    """
    reader, frozen = OptimizerReader(path, layers), CheckpointReader(path, layers)
    for index, layer in weight_layers(model):
        here = (grid.tp_rank, grid.tp_size)
        fill_layer(
            layer,
            {
                name: reader.shard(layers.owner(index, name), name, FP32, *here)
                if parameter.requires_grad
                else frozen.shard(index, name, *here)
                for name, parameter in layer.named_parameters()
            },
        )


@torch.no_grad()
def load_resharded_optimizer(engine: Engine, path: Path) -> None:
    """Load this rank's optimizer, loss scaler, counters and schedule from a checkpoint of any layout.

    No collective operations take place.

    Raises:
        CheckpointError: If something is missing in the checkpoint, or the optimizer's wrapper is unknown.
    """
    reader = OptimizerReader(path, engine.plan.layers)
    for target in optimizer_tensors(engine):
        engine.optimizer.state[target.tensor] = _read_states(target, engine, reader)
    _restore_scaler(engine, reader)
    engine.restore_counters(reader.client_state)


def _read_states(target: OptimizerTensor, engine: Engine, reader: OptimizerReader) -> dict[str, Tensor]:
    """Fill an optimizer's tensor with fp32 weights, and return its states; none before the first step."""
    here = (engine.grid.tp_rank, engine.grid.tp_size)
    filled = {FP32: target.tensor}
    for part in target.fragments:
        for name in (FP32, *sorted(reader.names(part.index, part.name))):
            saved = reader.shard(part.index, part.name, name, *here)
            if name != FP32 and reader.optimizer.state(name).axis is not None:  # of a whole parameter
                filled[name] = saved.to(target.tensor, copy=True)
                continue
            tensor = filled.setdefault(name, torch.zeros_like(target.tensor))
            values = saved.reshape(-1)[part.first : part.first + part.length]
            tensor.view(-1)[part.start : part.start + part.length].copy_(values)
    states = {name: tensor for name, tensor in filled.items() if name != FP32}
    if states and reader.optimizer.counts_steps:
        states["step"] = torch.tensor(reader.step, dtype=torch.float32, device=target.tensor.device)
    return states


def optimizer_tensors(engine: Engine) -> Iterator[OptimizerTensor]:
    """Yield the tensors that the optimizer updates on this rank. Raises CheckpointError for an unknown wrapper."""
    wrapper, model = engine.deepspeed_engine.optimizer, engine.deepspeed_engine.module
    names = _names(model, engine.plan.layers)
    groups = planned_groups(engine.plan, model.named_parameters())
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        yield from _stage3_tensors(wrapper, engine.grid, names)
    elif isinstance(wrapper, DeepSpeedZeroOptimizer | BF16_Optimizer):
        for number, (group, inner) in enumerate(zip(groups, engine.optimizer.param_groups, strict=True)):
            yield _flat_tensor(number, group["params"], inner["params"], names)
    elif wrapper is engine.optimizer or isinstance(wrapper, FP16_UnfusedOptimizer):
        for group, inner in zip(groups, engine.optimizer.param_groups, strict=True):
            for parameter, tensor in zip(group["params"], inner["params"], strict=True):
                yield OptimizerTensor(tensor, (Fragment(*names[id(parameter)], 0, parameter.numel(), 0),))
    else:
        raise CheckpointError(
            f"the optimizer's state cannot be loaded into {type(wrapper).__name__} from another layout; "
            "resume with the layout it was saved with, or set no_load_optim"
        )


def _flat_tensor(number: int, parameters: list[nn.Parameter], tensors: list[Tensor], names: Names) -> OptimizerTensor:
    """Return one group's flat partition. DeepSpeed links each parameter that has a part in it to that part."""
    assert len(tensors) == 1, f"group {number} has {len(tensors)} flat partitions"
    fragments = []
    for parameter in parameters:
        link = getattr(parameter, "_hp_mapping", None)
        if link is not None:
            source, target = link.lp_fragment_address, link.hp_fragment_address
            fragments.append(Fragment(*names[id(parameter)], source.start, source.numel, target.start))
    return OptimizerTensor(tensors[0], tuple(fragments))


def _stage3_tensors(wrapper: Any, grid: ParallelGrid, names: Names) -> Iterator[OptimizerTensor]:
    """Yield ZeRO 3's sub-groups of parameters; of each parameter this data rank holds an equal (padded) part."""
    for tensor, parameters in zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True):
        if tensor.numel() == 0:
            raise CheckpointError(
                "the optimizer's state is offloaded to NVMe, where it cannot be loaded from another layout; resume "
                "with the layout it was saved with"
            )
        fragments, start = [], 0
        for parameter in parameters:
            part = parameter.partition_numel()
            first = grid.dp_rank * part
            length = max(0, min(part, parameter.ds_numel - first))
            fragments.append(Fragment(*names[id(parameter)], first, length, start))
            start += part
        yield OptimizerTensor(tensor, tuple(fragments))


def _names(model: nn.Module, layers: LayerPlan) -> Names:
    return {
        id(p): (layers.owner(index, name), name)
        for index, layer in weight_layers(model)
        for name, p in layer.named_parameters()
    }


def _restore_scaler(engine: Engine, reader: OptimizerReader) -> None:
    if engine.plan.precision != "fp16":
        return
    if reader.scaler is None:
        _log.info(
            "the checkpoint, saved in %s, has no loss scale: it starts at its initial value", reader.layout["precision"]
        )
        return
    wrapper = engine.deepspeed_engine.optimizer
    target = wrapper.loss_scale_config if isinstance(wrapper, FP16_UnfusedOptimizer) else wrapper.loss_scaler
    for name, value in reader.scaler.items():
        if hasattr(target, name):
            setattr(target, name, value)
