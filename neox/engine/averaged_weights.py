"""Exponential moving average of the trained weights (`ema_decay`), divided over ranks as the optimizer's weights are.

The optimizer updates fp32 tensors on this rank, whatever DeepSpeed wraps around it: whole parameters, or parts of them
(`neox.engine.optimizer_tensors`). The average has a tensor for each of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from neox.architecture import LayerPlan, ParameterSpec
from neox.checkpoint import CheckpointReader, Parts
from neox.checkpoint.optimizer_formats import Key
from neox.engine.optimizer_tensors import OptimizerTensor, optimizer_tensors, parameter_names
from neox.engine.weights import gathered, weight_layers
from neox.optim import ClippedOptimizer
from neox.parallel import ParallelGrid, first_own_element, holds_divided_experts
from neox.plan import RunPlan


class AveragedWeights:
    """Average of the trained weights on this rank. It starts as the weights. Arguments as for `optimizer_tensors`.

    Attributes:
        steps: Number of steps that the average has followed.
    """

    def __init__(
        self, plan: RunPlan, grid: ParallelGrid, model: nn.Module, wrapper: Any, optimizer: ClippedOptimizer
    ) -> None:
        self._settings = plan.config.optimizer
        self._grid = grid
        self._model = model
        self._layers = plan.layers
        self._trained: Sequence[OptimizerTensor] = tuple(optimizer_tensors(plan, grid, model, wrapper, optimizer))
        self._averages: list[Tensor] = []
        # Without a wrapper the optimizer's tensors are the parameters.
        self._updates_parameters = wrapper is optimizer
        self._is_divided = hasattr(wrapper, "dp_process_group")
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Set the average to the weights, as before the first step."""
        self.steps = 0
        self._averages = []
        for item in self._trained:
            device = item.tensor.device
            if self._settings.ema_device == "cpu":
                device = torch.device("cpu")
            self._averages.append(item.tensor.detach().to(device, copy=True))

    @torch.no_grad()
    def update(self) -> None:
        """Follow a step: average = d * average + (1 - d) * weights, every `ema_every` steps."""
        self.steps += 1
        if self.steps % self._settings.ema_every:
            return
        factor = self._settings.ema_factor(self.steps)
        for item, average in zip(self._trained, self._averages, strict=True):
            average.lerp_(item.tensor.detach().to(average.device), 1 - factor)

    def parts(self) -> Parts | None:
        """Return this rank's part of the average for a checkpoint; None if another data rank writes the same.

        The first data rank writes whole parameters. With expert parallelism, the first group of ranks that together
        hold all experts writes these. As in layer files, only tensor rank 0 has biases that gpt-neox adds up over
        tensor ranks.
        """
        writes_only_experts = not self._is_divided and self._grid.dp_rank != 0
        if writes_only_experts and self._grid.dp_rank >= self._grid.ep_size:
            return None
        parts: dict[int, dict[str, tuple[int, Tensor]]] = {}
        for item, average in zip(self._trained, self._averages, strict=True):
            for fragment in item.fragments:
                if not fragment.length:
                    continue
                index, name = fragment.key
                if writes_only_experts and not _spec(self._layers, fragment.key).experts:
                    continue
                values = average.view(-1)[fragment.start : fragment.start + fragment.length]
                if self._grid.tp_rank > 0 and _spec(self._layers, fragment.key).summed_in_neox:
                    values = torch.zeros_like(values)
                parts.setdefault(index, {})[name] = (fragment.first, values)
        return parts

    @torch.no_grad()
    def load(self, path: Path, steps: int) -> None:
        """Read the average from a checkpoint of any degrees.

        Args:
            path: The checkpoint.
            steps: Number of steps that its average has followed.

        Raises:
            CheckpointError: If the checkpoint has no average, or files of it are missing.
        """
        reader = CheckpointReader(path, self._layers, weights="ema")
        for item, average in zip(self._trained, self._averages, strict=True):
            for fragment in item.fragments:
                if not fragment.length:
                    continue
                index, name = fragment.key
                whole = reader.shard(index, name, self._grid.tp_rank, self._grid.tp_size).reshape(-1)
                part = average.view(-1)[fragment.start : fragment.start + fragment.length]
                part.copy_(whole[fragment.first : fragment.first + fragment.length])
        self.steps = steps

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Put the average into the model, and the trained weights back at the end; all ranks call it together.

        The two change places, one tensor at a time, so that no further copy is held. They stay there after an error,
        which ends the run, because other ranks would not take part in the way back.
        """
        self._exchange()
        yield
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for item, average in zip(self._trained, self._averages, strict=True):
            weights = item.tensor.detach()
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)
        if not self._updates_parameters:
            self._copy_to_model()

    def _copy_to_model(self) -> None:
        """Copy the optimizer's fp32 tensors to the parameters, one layer at a time; data ranks gather their parts."""
        names = parameter_names(self._model, self._layers)
        copied: set[int] = set()
        for _, layer in weight_layers(self._model):
            wholes = []
            for parameter in layer.parameters():
                if parameter.requires_grad and id(parameter) not in copied:
                    copied.add(id(parameter))
                    wholes.append((parameter, self._whole(names[id(parameter)], parameter)))
            with gathered(layer, changed=True):
                for parameter, whole in wholes:
                    parameter.copy_(whole.view(parameter.shape))

    def _whole(self, key: Key, parameter: nn.Parameter) -> Tensor:
        """Return the optimizer's fp32 weights of a parameter, flattened, on all data ranks that hold it."""
        elements = getattr(parameter, "ds_numel", parameter.numel())
        whole = torch.zeros(elements, dtype=torch.float32, device=self._device)
        for item in self._trained:
            for fragment in item.fragments:
                if fragment.key == key and fragment.length:
                    part = item.tensor.view(-1)[fragment.start : fragment.start + fragment.length]
                    first = fragment.first - first_own_element(parameter)
                    whole[first : first + fragment.length] = part.to(whole.device)
        if self._is_divided and self._grid.dp_size > 1:
            same = self._grid.edp_group if holds_divided_experts(parameter) else self._grid.dp_group
            dist.all_reduce(whole, group=same)
        return whole

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device


def _spec(layers: LayerPlan, key: Key) -> ParameterSpec:
    """Return the specification of a parameter."""
    for spec in layers[key.layer].parameters:
        if spec.name == key.name:
            return spec
    raise KeyError(key)
