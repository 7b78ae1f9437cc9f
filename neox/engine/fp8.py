"""Products in fp8 in the linear layers of a model's blocks."""

from __future__ import annotations

import torch
from torch import nn

from neox.errors import LaunchError
from neox.launch.machine import LEAST_CAPABILITY
from neox.log import get_logger
from neox.model import Block
from neox.ops import FP8_RECIPES
from neox.parallel import ColumnParallelLinear, RowParallelLinear
from neox.plan import RunPlan

_log = get_logger(__name__)


def multiply_in_fp8(model: nn.Module, plan: RunPlan, device: torch.device) -> None:
    """Let linear layers that are split over tensor ranks multiply in fp8, in blocks, where the plan asks for it.

    What gMLP blocks multiply besides, over positions and in their small attention, stays bf16.

    Raises:
        LaunchError: The GPU has no products in fp8; for hosts that nobody asked before the start.
    """
    if plan.config.training.fp8 is None:
        return
    if device.type == "cpu":
        _log.warning("fp8: a CPU has no products in fp8 and imitates them in fp32, which is slower than bf16")
    elif float("{}.{}".format(*torch.cuda.get_device_capability(device))) < LEAST_CAPABILITY["fp8"]:
        name = torch.cuda.get_device_name(device)
        raise LaunchError(f"fp8 needs GPUs of compute capability {LEAST_CAPABILITY['fp8']} or more, unlike {name}")
    recipe = FP8_RECIPES[plan.config.training.fp8]
    multiply, products = recipe.linear, (recipe.product, recipe.of_gradient)  # made once: all blocks share one graph
    for block in (module for module in model.modules() if isinstance(module, Block)):
        for layer in block.modules():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                layer.multiply = multiply
            if isinstance(layer, ColumnParallelLinear):
                layer.products = products
