"""Loading an optimizer's state that was saved with other parallel degrees, another ZeRO stage or another precision.

To load is to fill every tensor of the optimizer from the checkpoint's parameters.
"""

from __future__ import annotations

from pathlib import Path

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor, nn

from neox.architecture import LayerPlan
from neox.checkpoint import CheckpointReader, OptimizerReader
from neox.checkpoint.optimizer_formats import FP32
from neox.engine.engine import Engine
from neox.engine.optimizer_tensors import OptimizerTensor, optimizer_tensors, parameter_names
from neox.engine.swap_files import SwappedStage3
from neox.engine.weights import fill_layer, weight_layers
from neox.log import get_logger
from neox.optim import planned_groups
from neox.parallel import ParallelGrid
from neox.plan import RunPlan

_log = get_logger(__name__)


def optimizer_order(model: nn.Module, plan: RunPlan) -> list[list[tuple[int, str]]]:
    """Return (layer index, name) of every parameter, by optimizer group, in the optimizer's order.

    Checkpoints store it, because without ZeRO DeepSpeed numbers parameters and does not name them.
    """
    names = parameter_names(model, plan.layers)
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
    model, wrapper = engine.deepspeed_engine.module, engine.deepspeed_engine.optimizer
    for target in optimizer_tensors(engine.plan, engine.grid, model, wrapper, engine.optimizer):
        engine.optimizer.keep(target.tensor, _read_states(target, engine, reader))
        if isinstance(wrapper, SwappedStage3):
            wrapper.keep_states(target.tensor)
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
