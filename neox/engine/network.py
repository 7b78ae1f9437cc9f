"""This rank's part of the network, built for training: partitioned, in fp8 or compiled as the plan says."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

from neox.engine.deepspeed_patches import move_weights_to_files, runtime_json
from neox.engine.distributed import grid_mpu
from neox.engine.pipeline import PipelineGPT
from neox.engine.shared import share_parameters
from neox.errors import LaunchError
from neox.launch.machine import LEAST_CAPABILITY
from neox.log import get_logger
from neox.model import GPT, Block, build_layer
from neox.objectives import Objective
from neox.ops import DTYPES, FP8_RECIPES
from neox.parallel import ColumnParallelLinear, ParallelGrid, RowParallelLinear
from neox.plan import RunPlan
from neox.plan.compiled import compiles_layers

_log = get_logger(__name__)
_GRAPHS = 64
"""Graphs of one layer class: kinds of attention, modes, lengths. torch stops compiling after 8 without a word."""


def build_model(plan: RunPlan, grid: ParallelGrid, objective: Objective, device: torch.device) -> nn.Module:
    """Build this rank's part of the network with its initial weights, in the precision of training."""
    dtype = DTYPES[plan.precision]
    model: nn.Module
    if plan.config.deepspeed.zero_optimization.stage == 3:
        model = _partitioned_model(plan, grid, device, dtype)
    elif grid.pp_size > 1:
        model = PipelineGPT(plan, grid, objective, device=device, dtype=dtype)
    else:
        model = GPT(plan, grid, device=device, dtype=dtype)
        share_parameters(enumerate(model.sequential), plan.layers)
    multiply_in_fp8(model, plan, device)
    compile_blocks(model, plan, device)
    return model


def _partitioned_model(plan: RunPlan, grid: ParallelGrid, device: torch.device, dtype: torch.dtype) -> GPT:
    """Build for ZeRO 3: partition each layer over data ranks before the next is built.

    So a model larger than a device's memory can be built.
    """
    directory = plan.config.deepspeed.zero_optimization.weights_directory

    def build(index: int) -> nn.Module:
        layer = build_layer(plan, index, grid, device=device, dtype=dtype)
        if plan.layers[index].parameters:
            Init(
                module=layer,
                data_parallel_group=grid.dp_group,
                config_dict_or_path=runtime_json(plan),
                dtype=dtype,
                mpu=grid_mpu(grid),
            )
            if directory is not None:
                move_weights_to_files(layer, Path(directory))
        return layer

    model = GPT(plan, grid, build=build)
    share_parameters(enumerate(model.sequential), plan.layers)
    return model


def multiply_in_fp8(model: nn.Module, plan: RunPlan, device: torch.device) -> None:
    """Let the linear layers of blocks multiply in fp8 if the plan asks for it.

    Other products of gMLP blocks, over positions and in their small attention, stay bf16.

    Raises:
        LaunchError: If the GPU has no products in fp8. Hosts that were not probed before the start find out here.
    """
    if plan.config.training.fp8 is None:
        return
    if device.type == "cpu":
        _log.warning("fp8: a CPU has no products in fp8 and imitates them in fp32, which is slower than bf16")
    else:
        _check_capability(device)
    # Made once, so that all blocks share one compiled graph.
    recipe = FP8_RECIPES[plan.config.training.fp8]
    multiply = recipe.linear
    products = (recipe.product, recipe.of_gradient)
    for block in model.modules():
        if not isinstance(block, Block):
            continue
        for layer in block.modules():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                layer.multiply = multiply
            if isinstance(layer, ColumnParallelLinear):
                layer.products = products


def _check_capability(device: torch.device) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if major + minor / 10 < LEAST_CAPABILITY["fp8"]:
        name = torch.cuda.get_device_name(device)
        raise LaunchError(f"fp8 needs GPUs of compute capability {LEAST_CAPABILITY['fp8']} or more, unlike {name}")


def compile_blocks(model: nn.Module, plan: RunPlan, device: torch.device) -> None:
    """Compile the blocks of a model in place if the plan asks for it. Names stay, and equal blocks share a graph."""
    keys = plan.config.training
    if not compiles_layers(plan.config, on_gpu=device.type == "cuda"):
        return
    if keys.compile_layers == "auto" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        _log.warning("compile_layers: auto finds no C compiler on this host: layers are not compiled, and slower")
        return
    import torch._dynamo.config
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = _GRAPHS
    if keys.activation_memory_budget is not None:
        torch._functorch.config.activation_memory_budget = keys.activation_memory_budget
    for module in model.modules():
        if isinstance(module, Block):
            module.compile()
