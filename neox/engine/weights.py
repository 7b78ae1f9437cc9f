"""Weights of the layers on this rank: writing them to layer files, reading them from a checkpoint of any degrees."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol, cast

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import Tensor, nn

from neox.architecture import ADAPTER, LayerPlan
from neox.checkpoint import CheckpointReader, LoadedWeights, OptimizerReader, neox_state
from neox.checkpoint.optimizer.file_formats import FP32
from neox.checkpoint.remote.partial_copies import fetch_files
from neox.checkpoint_files.names import parse_layer_file
from neox.errors import CheckpointError
from neox.model import fp32_values
from neox.parallel import ParallelGrid, gather_experts, holds_divided_experts, own_experts


class _Layers(Protocol):
    """A model whose layers have the indices of the layer plan: `GPT` or `PipelineGPT`."""

    def weight_layers(self) -> Iterator[tuple[int, nn.Module]]: ...


def weight_layers(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Return (index in the layer plan, module) of the layers with weights on this rank, in ascending order.

    A tied head's copy of the embedding has the embedding's index, 0.
    """
    return cast(_Layers, model).weight_layers()


def write_weights(
    model: nn.Module, layers: LayerPlan, grid: ParallelGrid, write: Callable[[int, Mapping[str, Tensor]], object]
) -> None:
    """Write this rank's layers. Data rank 0 writes; the others take part in gathering (ZeRO 3, divided experts).

    Args:
        model: This rank's part of the network.
        layers: The network's layers.
        grid: This rank's grid.
        write: Function of a layer's index and its parameters by name. If it fails, the error is raised after the
            collective operations of all layers.
    """
    failure: Exception | None = None
    for index, layer in weight_layers(model):
        with gathered(layer):
            experts = {}
            for name, parameter in layer.named_parameters():
                if holds_divided_experts(parameter):
                    experts[name] = gather_experts(parameter.detach(), grid)
            exact = fp32_values(layer)
            if grid.dp_rank != 0 or _is_tied_copy(index, layer) or failure is not None:
                continue
            state = {name: p.detach() for name, p in layer.named_parameters()} | experts | exact
            try:
                write(index, neox_state(layers[index], state, grid.tp_rank))
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure


def read_weights(
    model: nn.Module,
    layers: LayerPlan,
    grid: ParallelGrid,
    path: Path,
    *,
    weights: LoadedWeights = "trained",
    finetune: bool = False,
    gpt_neox_date: datetime.date | None = None,
    new_layers: Collection[int] = (),
) -> None:
    """Fill this rank's layers from a checkpoint of any parallel degrees. Raises CheckpointError if it does not fit.

    Args:
        model: This rank's part of the network.
        layers: The network's layers.
        grid: This rank's grid.
        path: The checkpoint.
        weights: Weights that are read: the trained ones, or their average.
        finetune: Whether the head may be tied on one side only, and copies of shared parameters may differ.
        gpt_neox_date: As of `CheckpointReader`.
        new_layers: Layers that keep their initial values, because the checkpoint lacks them.
    """
    reader = CheckpointReader(path, layers, weights=weights, finetune=finetune, gpt_neox_date=gpt_neox_date)
    missing = reader.new_layers - set(new_layers)
    if missing:
        raise CheckpointError(f"{path}: layers {sorted(missing)} are missing in this machine's copy")
    _fetch_layers(path, {index for index, _ in weight_layers(model)} - reader.new_layers)
    for index, layer in weight_layers(model):
        if index in reader.new_layers:
            continue
        tensors = reader.layer_shard(index, grid.tp_rank, grid.tp_size)
        for name, tensor in tensors.items():
            owner = layers.owner(index, name)
            if owner == index:
                continue
            shared = reader.shard(owner, name, grid.tp_rank, grid.tp_size)
            if not finetune and not torch.equal(tensor, shared):
                raise CheckpointError(
                    f"{path}: {name} is one parameter of the network, but layers {owner} and {index} hold different "
                    "values: gpt-neox lets the copies of pipeline stages drift apart. Such a checkpoint generates and "
                    f"is evaluated as it is; training starts from layer {owner}'s values with `finetune: true`"
                )
            tensors[name] = shared
        fill_layer(layer, tensors)
    reader.note_averages()


def _fetch_layers(path: Path, indices: Collection[int]) -> None:
    """Fetch layers of a partial copy of a checkpoint, several files at a time. Raises CheckpointError."""
    files = []
    for file in path.iterdir():
        parsed = parse_layer_file(file.name)
        if parsed is not None and parsed[0] in indices:
            files.append(file)
    fetch_files(files)


def read_weights_fp32(
    model: nn.Module,
    layers: LayerPlan,
    grid: ParallelGrid,
    path: Path,
    *,
    gpt_neox_date: datetime.date | None = None,
) -> None:
    """Fill this rank's layers from the optimizer's fp32 weights: for a run in another precision than the saved one.

    Frozen weights, which the optimizer does not have, come from the layer files.
    """
    trained = OptimizerReader(path, layers, gpt_neox_date=gpt_neox_date)
    frozen = CheckpointReader(path, layers, gpt_neox_date=gpt_neox_date)
    for index, layer in weight_layers(model):
        tensors = {}
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                owner = layers.owner(index, name)
                tensors[name] = trained.shard(owner, name, FP32, grid.tp_rank, grid.tp_size)
            else:
                tensors[name] = frozen.shard(index, name, grid.tp_rank, grid.tp_size)
        fill_layer(layer, tensors)
    trained.note_averages()
    frozen.note_averages()


@torch.no_grad()
def fill_layer(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy this tensor rank's tensors into a layer's parameters, by name; under ZeRO 3 all data ranks take part.

    Adapters that are not among the tensors keep their initial values.
    """
    with gathered(layer, changed=True):
        for name, parameter in layer.named_parameters():
            if ADAPTER not in name or name in tensors:
                parameter.copy_(own_experts(tensors[name], parameter))


def gathered(layer: nn.Module, *, changed: bool = False) -> AbstractContextManager[object]:
    """Return a context in which all parameters of a layer are complete on this rank (does nothing without ZeRO-3).

    Args:
        layer: Module whose parameters are gathered.
        changed: Whether the first data rank's values are kept when the context ends.
    """
    parameters = list(layer.parameters())
    if not any(hasattr(p, "ds_id") for p in parameters):
        return nullcontext()
    context: AbstractContextManager[object] = GatheredParameters(parameters, modifier_rank=0 if changed else None)
    return context


def _is_tied_copy(index: int, layer: nn.Module) -> bool:
    return index == 0 and any(getattr(p, "ds_pipe_replicated", False) for p in layer.parameters())
