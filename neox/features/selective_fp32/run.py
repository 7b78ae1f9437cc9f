"""Parameters of mixers that stay fp32 when training in 16 bits: decays and steps are exponentials of them.

DeepSpeed's engines and optimizers have one precision for all parameters (its `data_types.keep_in_fp32_modules` is for
buffers). The weights that the optimizer updates are fp32, and divided over data ranks. So the mixers get copies:

    optimizer's weights   [ A_log 0 ... 767 | ... ]   [ A_log 768 ... 1535 | ... ]      fp32, on two data ranks
                                  |  refresh: own elements, then a sum over the data ranks
    copies                [ A_log 0 ......... 1535 | D ... ]  = `Mixer.set_fp32`        fp32, on each
    parameters            A_log, D                                                      16 bits, with the gradients

Layer files get the copies, as gpt-neox's do with this key. At a start without an optimizer's state the optimizer's
weights are set to the unrounded values of the layer files, or of the initial weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from neox.architecture import ParameterSpec
from neox.architecture.recurrence import selective_fp32
from neox.checkpoint import CheckpointReader
from neox.checkpoint.optimizer.file_formats import Key
from neox.engine import Engine, Feature, RunStart, StepResult, TrainedModel, all_succeeded
from neox.engine.weights import weight_layers
from neox.model import Mixer, drawn_weights
from neox.parallel import shard
from neox.plan.network.fp32_parameters import asks_for_fp32
from neox.plan.run_start import StartMode


class _Place(NamedTuple):
    """A parameter, the place of its copy among all copies, and whether the optimizer updates it."""

    spec: ParameterSpec
    start: int
    numel: int
    is_trained: bool

    @property
    def span(self) -> slice:
        """Range of its copy."""
        return slice(self.start, self.start + self.numel)


def build(model: TrainedModel, start: RunStart) -> SelectiveFp32 | None:
    """Return the copies; None in fp32, if the network has no such parameters, or if they are not asked for.

    A pipeline stage without such parameters has the feature, too: all ranks report to each other how loading went.
    """
    if model.plan.precision == "fp32" or not asks_for_fp32(model.plan.config):
        return None
    if not any(selective_fp32(layer.parameters) for layer in model.plan.layers):
        return None
    return SelectiveFp32(model)


class SelectiveFp32(Feature):
    """Fp32 copies of some parameters, which the mixers compute with.

    Attributes:
        places: Where the copy of each parameter of this rank is, by its key. A pipeline stage may have none.
    """

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        self._updated = model.optimizer_tensors()
        self.places: dict[Key, _Place] = {}
        modules = dict(weight_layers(model.module))
        total = 0
        for index in modules:
            for spec in selective_fp32(model.plan.layers[index].parameters):
                numel = spec.shard_numel(model.grid.tp_size)
                is_trained = modules[index].get_parameter(spec.name).requires_grad
                self.places[Key(index, spec.name)] = _Place(spec, total, numel, is_trained)
                total += numel
        self._copies = torch.zeros(total, dtype=torch.float32, device=model.device)
        for key, place in self.places.items():
            path, _, name = key.name.rpartition(".")
            mixer = cast(Mixer, modules[key.layer].get_submodule(path))
            mixer.set_fp32(name, self._copies[place.span].view(place.spec.shard_shape(model.grid.tp_size)))

    def load(self, engine: Engine, start: RunStart) -> None:
        """Take the values of the checkpoint, or the initial ones; those of a loaded optimizer if there is one."""
        values = all_succeeded(lambda: dict(self._starting_values(start)), "reading parameters that stay fp32")
        for key, tensor in values.items():
            self._copies[self.places[key].span] = tensor.reshape(-1).to(self._copies)
        if start.mode is not StartMode.RESUME:
            self._set_updated()
        self.refresh()

    def after_step(self, engine: Engine, result: StepResult) -> Mapping[str, float]:
        """Follow an update."""
        if not result.update_skipped:
            self.refresh()
        return {}

    def weights_changed(self, engine: Engine) -> None:
        """Take what is in the optimizer's tensors now."""
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the optimizer's fp32 weights; all data ranks call it together, which have the same parameters."""
        if not self.places:
            return
        updated = torch.zeros_like(self._copies)
        for span, part in self._parts():
            updated[span] = part.to(updated.device)
        if self._model.divides_optimizer and self._model.grid.dp_size > 1:
            dist.all_reduce(updated, group=self._model.grid.dp_group)
        for place in self.places.values():
            if place.is_trained:
                self._copies[place.span] = updated[place.span]

    @torch.no_grad()
    def _set_updated(self) -> None:
        """Set the optimizer's weights to the copies."""
        for span, part in self._parts():
            part.copy_(self._copies[span])

    def _parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of the copies, and the elements of the optimizer's tensors that they are copies of."""
        for item in self._updated:
            for fragment in item.fragments:
                place = self.places.get(fragment.key)
                if place is not None and fragment.length:
                    first = place.start + fragment.first
                    part = item.tensor.detach().view(-1)[fragment.start : fragment.start + fragment.length]
                    yield slice(first, first + fragment.length), part

    def _starting_values(self, start: RunStart) -> Iterator[tuple[Key, Tensor]]:
        """Yield the fp32 values on this tensor rank that a run starts with; not those of a loaded optimizer."""
        if not self.places:
            return
        plan, grid = self._model.plan, self._model.grid
        drawn = drawn_weights(plan)
        reader = None
        if start.checkpoint is not None:
            finetune = start.mode is StartMode.FINETUNE
            date = plan.config.checkpoint.gpt_neox_date
            reader = CheckpointReader(
                start.checkpoint, plan.layers, weights=start.weights, finetune=finetune, gpt_neox_date=date
            )
        for key, place in self.places.items():
            if place.is_trained and start.mode is StartMode.RESUME:
                continue
            if reader is not None and key.layer not in reader.new_layers:
                yield key, reader.shard(*key, grid.tp_rank, grid.tp_size)
            else:
                full = drawn.full(place.spec, plan.layers[key.layer])
                yield key, shard(full, place.spec, grid.tp_rank, grid.tp_size)
