"""Tensors that an optimizer updates on this rank, and which parts of which parameters they hold.

Whatever wrapper DeepSpeed puts around it, the optimizer inside updates fp32 tensors: whole parameters, fp32 copies of
them, or flat partitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from neox.architecture import LayerPlan, MatrixRows, ParameterSpec
from neox.checkpoint.optimizer.file_formats import Key
from neox.engine.deepspeed_patches import counts_in_norm
from neox.engine.weights import weight_layers
from neox.errors import CheckpointError
from neox.optim import ClippedOptimizer, MatrixPart, MatrixShards, is_hidden, planned_groups
from neox.parallel import ParallelGrid, first_own_element
from neox.plan import RunPlan

Names = Mapping[int, Key]
"""Keys of a model's parameters by the `id` of the parameter."""


@dataclass(frozen=True)
class Fragment:
    """A part of a flattened parameter on this tensor rank.

    Attributes:
        key: The parameter.
        first: First element of the parameter.
        length: Number of elements; 0 if this data rank holds only padding.
        start: Position of the first element in the optimizer's tensor.
    """

    key: Key
    first: int
    length: int
    start: int


@dataclass(frozen=True)
class OptimizerTensor:
    """An fp32 tensor of the optimizer, and the fragments in it. Elements that no fragment covers are padding."""

    tensor: Tensor
    fragments: tuple[Fragment, ...]


def divides_optimizer(wrapper: Any) -> bool:
    """Return whether DeepSpeed divides the optimizer's state over data ranks, and writes each part to a file."""
    return hasattr(wrapper, "dp_process_group")


def parameter_names(model: nn.Module, layers: LayerPlan) -> Names:
    """Return the keys of a model's parameters. A copy of a shared parameter has the key of its owner."""
    names: dict[int, Key] = {}
    for index, layer in weight_layers(model):
        for name, parameter in layer.named_parameters():
            names[id(parameter)] = Key(layers.owner(index, name), name)
    return names


def optimizer_order(model: nn.Module, plan: RunPlan) -> list[list[tuple[int, str]]]:
    """Return the keys of all parameters by optimizer group, in the optimizer's order.

    Checkpoints store it, because without ZeRO DeepSpeed numbers parameters and does not name them.
    """
    names = parameter_names(model, plan.layers)
    groups = planned_groups(plan, model.named_parameters())
    order = []
    for group in groups:
        keys = [names[id(parameter)] for parameter in group["params"]]
        order.append([(key.layer, key.name) for key in keys])  # plain tuples: checkpoints hold no classes
    return order


def optimizer_tensors(
    plan: RunPlan, grid: ParallelGrid, model: nn.Module, wrapper: Any, optimizer: ClippedOptimizer
) -> Iterator[OptimizerTensor]:
    """Yield the tensors that the optimizer updates on this rank.

    Args:
        plan: The run.
        grid: This rank's grid.
        model: This rank's part of the network.
        wrapper: DeepSpeed's wrapper of the optimizer, or the optimizer itself.
        optimizer: The optimizer.

    Raises:
        CheckpointError: If the wrapper is unknown.
    """
    names = parameter_names(model, plan.layers)
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        yield from _stage3_tensors(wrapper, names)
        return
    groups = planned_groups(plan, model.named_parameters())
    pairs = zip(groups, optimizer.param_groups, strict=True)
    if isinstance(wrapper, DeepSpeedZeroOptimizer | BF16_Optimizer):
        for number, (group, inner) in enumerate(pairs):
            yield _flat_tensor(number, group["params"], inner["params"], names)
        return
    if wrapper is not optimizer and not isinstance(wrapper, FP16_UnfusedOptimizer):
        raise CheckpointError(
            f"the optimizer's state cannot be loaded into DeepSpeed's {type(wrapper).__name__}, whose layout is not "
            "known here; set no_load_optim"
        )
    for group, inner in pairs:
        for parameter, tensor in zip(group["params"], inner["params"], strict=True):
            first = first_own_element(parameter)
            whole = Fragment(names[id(parameter)], first=first, length=parameter.numel(), start=0)
            yield OptimizerTensor(tensor, (whole,))


def _flat_tensor(number: int, parameters: list[nn.Parameter], tensors: list[Tensor], names: Names) -> OptimizerTensor:
    """Return the flat partition of one group. DeepSpeed links each parameter that has a part in it to that part."""
    assert len(tensors) == 1, f"group {number} has {len(tensors)} flat partitions"
    fragments = []
    for parameter in parameters:
        link = getattr(parameter, "_hp_mapping", None)
        if link is not None:
            source = link.lp_fragment_address
            target = link.hp_fragment_address
            first = first_own_element(parameter) + source.start
            fragments.append(Fragment(names[id(parameter)], first, source.numel, target.start))
    return OptimizerTensor(tensors[0], tuple(fragments))


def _stage3_tensors(wrapper: Any, names: Names) -> Iterator[OptimizerTensor]:
    """Yield the tensors of ZeRO 3's sub-groups. Ranks that share a parameter hold equal (padded) parts of it."""
    for tensor, parameters in zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True):
        fragments = []
        start = 0
        for parameter in parameters:
            part = parameter.partition_numel()
            first = parameter.ds_zero_partition_rank * part
            length = max(0, min(part, parameter.ds_numel - first))
            first += first_own_element(parameter)
            fragments.append(Fragment(names[id(parameter)], first, length, start))
            start += part
        yield OptimizerTensor(tensor, tuple(fragments))


def matrix_parts(
    plan: RunPlan,
    grid: ParallelGrid,
    model: nn.Module,
    names: Names,
    tensors: Sequence[OptimizerTensor],
    *,
    split: bool,
) -> dict[Tensor, tuple[MatrixPart, ...]]:
    """Return the parts of hidden matrices in the optimizer's tensors, for one that updates whole matrices.

    All data ranks call it together.

    Args:
        plan: The run.
        grid: This rank's grid.
        model: This rank's part of the network.
        names: Keys of the model's parameters.
        tensors: The optimizer's tensors.
        split: Whether what is stored in one matrix is divided into several (`ParameterSpec.matrices`).
    """
    hidden = {names[id(parameter)] for parameter in model.parameters() if is_hidden(parameter)}
    matrices: dict[Key, tuple[MatrixRows, ...]] = {}
    shards: dict[Key, MatrixShards | None] = {}
    for key in sorted(hidden):
        spec = next(spec for spec in plan.layers[key.layer].parameters if spec.name == key.name)
        matrices[key] = tuple(spec.shard_spec(grid.tp_size).matrices(split=split))
        shards[key] = _shards_of(spec, grid)
    here = [{part.key: part for part in tensor.fragments if part.key in matrices} for tensor in tensors]
    ranks = [here] * grid.dp_size
    if grid.dp_size > 1:
        dist.all_gather_object(ranks, here, group=grid.dp_group)
    parts: dict[Tensor, tuple[MatrixPart, ...]] = {}
    for number, tensor in enumerate(tensors):
        of_ranks = [fragments[number] for fragments in ranks]
        parts[tensor.tensor] = tuple(_parts_of_tensor(of_ranks, matrices, shards, grid))
    return parts


def _parts_of_tensor(
    of_ranks: Sequence[Mapping[Key, Fragment]],
    matrices: Mapping[Key, tuple[MatrixRows, ...]],
    shards: Mapping[Key, MatrixShards | None],
    grid: ParallelGrid,
) -> Iterator[MatrixPart]:
    """Yield the parts of one tensor. Ranks gather shared matrices together, so all yield them in the same order.

    Args:
        of_ranks: Fragments of hidden parameters in the tensor, of every data rank.
        matrices: The matrices of each hidden parameter, or this tensor rank's shards of them.
        shards: How tensor ranks divide the matrices of each parameter.
        grid: This rank's grid.
    """
    for key, of_key in matrices.items():
        for matrix in of_key:
            pieces = [_piece(fragments.get(key), matrix) for fragments in of_ranks]
            lengths = [piece.length for piece in pieces if piece.length]
            is_divided = any(length < matrix.rows * matrix.columns for length in lengths)
            # Ranks without a part take part in gathering, too.
            if is_divided or pieces[grid.dp_rank].length:
                own = pieces[grid.dp_rank]
                yield MatrixPart(
                    (matrix.rows, matrix.columns),
                    own.first,
                    own.length,
                    own.start,
                    turns=matrix.turns,
                    group=grid.dp_group if is_divided else None,
                    shards=shards[key],
                )


def _shards_of(spec: ParameterSpec, grid: ParallelGrid) -> MatrixShards | None:
    """Return how tensor ranks divide the matrices of a parameter; None if each has all of them."""
    if spec.partition_dim is None or grid.tp_size == 1 or grid.tp_group is None:
        return None
    dim = spec.partition_dim - (len(spec.shape) - 2)  # behind the experts of a stack
    return MatrixShards(dim, grid.tp_rank, grid.tp_size, grid.tp_group)


def _piece(fragment: Fragment | None, matrix: MatrixRows) -> Fragment:
    """Return the part of a matrix in a fragment of its parameter, counted from the matrix's first element."""
    if fragment is None:
        return Fragment(Key(0, ""), first=0, length=0, start=0)
    begin = matrix.first * matrix.columns
    first = max(fragment.first, begin)
    last = min(fragment.first + fragment.length, begin + matrix.rows * matrix.columns)
    if first >= last:
        return Fragment(fragment.key, first=0, length=0, start=0)
    return Fragment(fragment.key, first - begin, last - first, fragment.start + first - fragment.first)


class CountedRange(NamedTuple):
    """Range of one of the optimizer's tensors that this rank counts: its layer, and its place in the flat tensor."""

    layer: int
    start: int
    length: int


def counted_ranges(
    plan: RunPlan, grid: ParallelGrid, model: nn.Module, wrapper: Any, optimizer: ClippedOptimizer
) -> dict[Tensor, list[CountedRange]]:
    """Return the ranges of each of the optimizer's tensors that no other rank counts.

    So a sum over these ranges and all ranks is one over the parameters of the network, in any layout. Left out are
    copies of tied and replicated parameters, padding, and without ZeRO all tensors of data ranks above 0.
    """
    names = parameter_names(model, plan.layers)
    counted = set()
    for parameter in model.parameters():
        if parameter.requires_grad and counts_in_norm(parameter, grid):
            counted.add(names[id(parameter)])
    is_divided = divides_optimizer(wrapper)
    ranges: dict[Tensor, list[CountedRange]] = {}
    for item in optimizer_tensors(plan, grid, model, wrapper, optimizer):
        ranges[item.tensor] = []
        for fragment in item.fragments:
            if fragment.length and fragment.key in counted and (is_divided or grid.dp_rank == 0):
                ranges[item.tensor].append(CountedRange(fragment.key.layer, fragment.start, fragment.length))
    return ranges


def updated_tensors(optimizer: ClippedOptimizer, ranges: Mapping[Tensor, Sequence[CountedRange]]) -> list[Tensor]:
    """Return the tensors that are about to be updated and that have counted ranges; ZeRO 3 updates in several calls."""
    found = []
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.grad is not None and ranges.get(tensor):
                found.append(tensor)
    return found


def counted_views(value: Tensor, ranges: Sequence[CountedRange]) -> Iterator[Tensor]:
    """Yield the counted ranges of a value that has the shape of one of the optimizer's tensors, flattened."""
    flat = value.detach().reshape(-1)
    for part in ranges:
        yield flat[part.start : part.start + part.length]
