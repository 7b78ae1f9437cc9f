"""Exponential moving average of the trained weights (`ema_decay`), divided over ranks as the optimizer's weights are.

The optimizer updates fp32 tensors on this rank, whatever DeepSpeed wraps around it: whole parameters, or shards of them
(`neox.engine.optimizer_tensors`). The average has a tensor for each of these.

A checkpoint stores the average, and the number of steps that it has followed, from which the decay of the next steps
follows. `ema_decay` itself is the configuration's at each start.

    in the checkpoint               content                                               written by   read by
    client state, averaged_steps    the number of steps                                   `state`      `load`
    averaged_dp_0000_mp_01_...pt    layer -> parameter -> (first element, fp32 values)    `files`      `read`

    2 data ranks wrote    averaged_dp_0000: from 0, 2048 values   averaged_dp_0001: from 2048, 2048 values
                            |  AveragedFiles.state            joined to the parameter of a saved tensor rank
                            |  CheckpointReader.shard         joined or cut along the split dimension, for this degree
                            v
    3 data ranks read     the elements that their optimizer tensors hold (`OptimizerTensor.fragments`)

`CheckpointReader(weights="ema")` gives generation, exports and fine-tuning the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from neox.architecture import LayerPlan, ParameterSpec
from neox.checkpoint import AVERAGED_STEPS, CheckpointReader, Parts, averaged_file
from neox.checkpoint.optimizer.file_formats import Key
from neox.engine import Engine, Feature, RunStart, StepResult, TrainedModel, all_succeeded
from neox.engine.arrivals import Arrivals
from neox.engine.optimizer_tensors import parameter_names
from neox.engine.weights import gathered, weight_layers
from neox.log import get_logger
from neox.parallel import first_own_element, holds_divided_experts

_log = get_logger(__name__)


def build(model: TrainedModel, start: RunStart) -> AveragedWeights | None:
    """Return the average; None without `ema_decay`."""
    if model.plan.config.optimizer.ema_decay is None:
        if AVERAGED_STEPS in start.saved:
            _log.info("the checkpoint's average of the weights is left out: ema_decay is not given")
        return None
    return AveragedWeights(model)


class AveragedWeights(Feature):
    """Average of the trained weights on this rank. It starts as the weights.

    A step that fp16 skips counts as well: the weights are the same, and the average comes closer to them.

    Attributes:
        steps: Number of steps that the average has followed.
    """

    def __init__(self, model: TrainedModel) -> None:
        self._settings = model.plan.config.optimizer
        self._grid = model.grid
        self._model = model.module
        self._layers = model.plan.layers
        self._trained = model.optimizer_tensors()
        self._averages: list[Tensor] = []
        self._arrivals = Arrivals()
        # Without a wrapper the optimizer's tensors are the parameters.
        self._updates_parameters = model.wrapper is model.optimizer
        self._is_divided = model.divides_optimizer
        self.restart()

    def load(self, engine: Engine, start: RunStart) -> None:
        """Read the average of the checkpoint of a resumed run; without one it starts as the weights."""
        saved = start.saved.get(AVERAGED_STEPS)
        path = start.checkpoint
        if path is None or saved is None:
            if start.saved:
                _log.info("ema_decay: %s holds no average of the weights; it starts with these weights", path)
            self.restart()
            return
        all_succeeded(lambda: self.read(path, int(saved)), f"loading the averaged weights of {path}")

    def after_step(self, engine: Engine, result: StepResult) -> Mapping[str, float]:
        """Follow a step."""
        engine.announce_overwrite()  # an update that was skipped has not done it
        self.update()
        return {}

    def other_weights(self, engine: Engine) -> Mapping[str, AbstractContextManager[None]]:
        """Return the average, with `eval_ema`."""
        if not self._settings.eval_ema:
            return {}
        return {"ema": self.in_model(engine)}

    def state(self, engine: Engine) -> Mapping[str, Any]:
        """Return the number of steps that the average has followed."""
        return {AVERAGED_STEPS: self.steps}

    def files(self, engine: Engine) -> Mapping[str, Any]:
        """Return the file with this rank's part of the average."""
        parts = self.parts()
        if parts is None:
            return {}
        grid = self._grid
        return {averaged_file(grid.dp_rank, grid.pp_rank * grid.tp_size + grid.tp_rank): parts}

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
        weights = [item.tensor.detach().view(-1) for item in self._trained]
        averages = [average.view(-1) for average in self._averages]
        for average, arrived in self._arrivals.beside(averages, weights):
            average.lerp_(arrived, 1 - factor)

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
    def read(self, path: Path, steps: int) -> None:
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
    def in_model(self, engine: Engine) -> Iterator[None]:
        """Put the average into the model, and the trained weights back at the end; all ranks call it together.

        The two change places, one tensor at a time, so that no further copy is held. They stay there after an error,
        which ends the run, because other ranks would not take part in the way back.
        """
        engine.announce_overwrite()
        self._exchange(engine)
        yield
        self._exchange(engine)

    @torch.no_grad()
    def _exchange(self, engine: Engine) -> None:
        for item, average in zip(self._trained, self._averages, strict=True):
            weights = item.tensor.detach()
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)
        if not self._updates_parameters:
            self._copy_to_model()
        for feature in engine.features:
            feature.weights_changed(engine)

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
