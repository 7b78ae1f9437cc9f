"""Compilation of transformer layers."""

from __future__ import annotations

import shutil

import torch
from torch import nn

from neox.log import get_logger
from neox.model import Block
from neox.plan import RunPlan
from neox.plan.compiled import compiles_layers

_log = get_logger(__name__)
_GRAPHS = 64
"""Graphs of one layer class: kinds of attention, modes, lengths. torch stops compiling after 8 without a word."""


def compile_blocks(model: nn.Module, plan: RunPlan, device: torch.device) -> None:
    """Compile the blocks of a model in place where the plan asks for it: names stay, equal blocks share a graph."""
    on_gpu, keys = device.type == "cuda", plan.config.training
    if not compiles_layers(plan.config, on_gpu=on_gpu):
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
