"""The tensors that an optimizer updates on a rank, and the parts of parameters in them.

Whatever wrapper DeepSpeed puts around it, the optimizer inside updates fp32 tensors: whole parameters, fp32 copies of
them, or flat partitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from neox.architecture import LayerPlan
from neox.engine.weights import weight_layers
from neox.errors import CheckpointError
from neox.optim import ClippedOptimizer, planned_groups
from neox.parallel import ParallelGrid
from neox.plan import RunPlan

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


def parameter_names(model: nn.Module, layers: LayerPlan) -> Names:
    """Return the layer and the name of each of a model's parameters."""
    return {
        id(p): (layers.owner(index, name), name)
        for index, layer in weight_layers(model)
        for name, p in layer.named_parameters()
    }


def optimizer_tensors(
    plan: RunPlan, grid: ParallelGrid, model: nn.Module, wrapper: Any, optimizer: ClippedOptimizer
) -> Iterator[OptimizerTensor]:
    """Yield the tensors that the optimizer updates on this rank.

    Args:
        plan: The run.
        grid: This rank's place.
        model: Its part of the network.
        wrapper: DeepSpeed's wrapper of the optimizer, or the optimizer.
        optimizer: The optimizer.

    Raises:
        CheckpointError: For an unknown wrapper.
    """
    names = parameter_names(model, plan.layers)
    groups = planned_groups(plan, model.named_parameters())
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        yield from _stage3_tensors(wrapper, grid, names)
    elif isinstance(wrapper, DeepSpeedZeroOptimizer | BF16_Optimizer):
        for number, (group, inner) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
            yield _flat_tensor(number, group["params"], inner["params"], names)
    elif wrapper is optimizer or isinstance(wrapper, FP16_UnfusedOptimizer):
        for group, inner in zip(groups, optimizer.param_groups, strict=True):
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
        fragments, start = [], 0
        for parameter in parameters:
            part = parameter.partition_numel()
            first = grid.dp_rank * part
            length = max(0, min(part, parameter.ds_numel - first))
            fragments.append(Fragment(*names[id(parameter)], first, length, start))
            start += part
        yield OptimizerTensor(tensor, tuple(fragments))
