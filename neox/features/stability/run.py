"""Numbers that show where a training becomes unstable, by layer (`log_stability_every`).

The passes are observed on the modules, the update on the optimizer's fp32 tensors on this rank, whatever DeepSpeed
wraps around it: whole parameters, or parts of them (`neox.engine.optimizer_tensors`). Ranks join their numbers once, at
the end of an observed step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from neox.engine import Engine, Feature, RunStart, StepResult, TrainedModel, counted_views, updated_tensors
from neox.engine.deepspeed_patches import clips_itself
from neox.metrics import STABILITY
from neox.model import Block, ForwardWatch, Stage
from neox.ops import device_family
from neox.plan import RunPlan
from neox.plan.devices.compiled import compiles

_SUMS = ("gradient", "weight", "update", "activation", "elements")
"""Sums by layer: squares of gradients, weights, updates and activations, and the number of activations."""


def build(model: TrainedModel, start: RunStart) -> Stability | None:
    """Return the observer; None without `log_stability_every`."""
    if model.plan.config.logging.log_stability_every is None:
        return None
    return Stability(model)


class Stability(Feature):
    """Observes every `log_stability_every`-th step. All ranks call every method together."""

    def __init__(self, model: TrainedModel) -> None:
        self._plan = model.plan
        self._grid = model.grid
        self._device = model.device
        self._optimizer = model.optimizer
        compiled = compiles(model.plan.config, device_family(model.device.type))
        stage: Any = model.deepspeed_engine.module.stage
        self._watch = ForwardWatch(_blocks(model.plan, stage), stage.ranges, compiled=compiled)
        self._ranges = model.counted_ranges()
        self._sums: dict[str, Tensor] = {}
        self._before: dict[Tensor, Tensor] = {}
        self._observes = False

    def before_passes(self, engine: Engine) -> None:
        """Observe the step if it is due."""
        every = self._plan.config.logging.log_stability_every or 1
        if (engine.iteration + 1) % every == 0:
            self.start()

    def after_step(self, engine: Engine, result: StepResult) -> Mapping[str, float]:
        """Return the numbers of a step that was observed."""
        if not self._observes:
            return {}
        return self.finish(result.grad_norm, skipped=result.update_skipped)

    def start(self) -> None:
        """Observe the next step."""
        layers = len(self._plan.layers)
        self._sums = {name: torch.zeros(layers, dtype=torch.float64, device=self._device) for name in _SUMS}
        self._watch.start()
        self._observes = True

    def finish(self, grad_norm: float, *, skipped: bool) -> dict[str, float]:
        """Return the numbers of the step, by their names in metrics.

        Args:
            grad_norm: Norm of the model's gradient before clipping.
            skipped: Whether the weights were left unchanged. Then there is nothing to say of gradients and updates.
        """
        self._observes = False
        self._watch.stop()
        self._before.clear()
        sums, logits = self._joined()
        values: dict[str, float] = {}
        for layer, largest in enumerate(logits):
            if math.isfinite(largest):
                values[f"{STABILITY}/attention_logit/{layer}"] = largest
        for layer, elements in enumerate(sums["elements"]):
            if elements:
                values[f"{STABILITY}/activation_rms/{layer}"] = math.sqrt(sums["activation"][layer] / elements)
        if skipped:
            return values
        norms = {"gradient_norm": "gradient", "weight_norm": "weight", "update_norm": "update"}
        factors = {"gradient_norm": self._clipped_by(grad_norm)}
        for name, observed in norms.items():
            for layer, square in enumerate(sums[observed]):
                if sums["weight"][layer]:
                    values[f"{STABILITY}/{name}/{layer}"] = math.sqrt(square) * factors.get(name, 1.0)
        return values

    def _joined(self) -> tuple[dict[str, list[float]], list[float]]:
        """Return the sums by layer over all ranks, and the largest attention logits by layer (-inf for none)."""
        layers = len(self._plan.layers)
        largest = torch.full((layers,), -math.inf, dtype=torch.float64, device=self._device)
        for layer, value in self._watch.logits.items():
            largest[layer] = value
        divides_tokens = self._grid.topology.sequence_parallel
        if self._grid.tp_rank == 0 or divides_tokens:
            for layer, square in self._watch.squares.items():
                self._sums["activation"][layer] = square
                self._sums["elements"][layer] = self._watch.elements[layer]
        sums = torch.stack([self._sums[name] for name in _SUMS])
        if self._grid.world_size > 1:
            dist.all_reduce(sums)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return dict(zip(_SUMS, sums.tolist(), strict=True)), largest.tolist()

    def _clipped_by(self, grad_norm: float) -> float:
        """Return the divisor by which DeepSpeed has clipped the gradients before the optimizer saw them."""
        limit = self._plan.config.deepspeed.gradient_clipping
        if clips_itself(self._plan) or not 0.0 < limit < grad_norm:
            return 1.0
        return (grad_norm + 1e-6) / limit

    @torch.no_grad()
    def before_update(self, engine: Engine) -> None:
        """Add up the gradients and weights of the tensors that are about to be updated, and copy these."""
        if not self._observes:
            return
        tensors = updated_tensors(self._optimizer, self._ranges)
        self._add("gradient", tensors, [_gradient(tensor) for tensor in tensors])
        self._add("weight", tensors, tensors)
        for tensor in tensors:
            self._before[tensor] = tensor.detach().clone()

    @torch.no_grad()
    def after_update(self, engine: Engine) -> None:
        """Add up the updates."""
        if not self._observes:
            return
        tensors = list(self._before)
        changes = [self._before[tensor].sub_(tensor) for tensor in tensors]
        self._add("update", tensors, changes)
        self._before.clear()

    def _add(self, name: str, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Add the squares of values, which have the shapes of the optimizer's tensors, to the sums of their layers."""
        views: list[Tensor] = []
        layers: list[int] = []
        for tensor, value in zip(tensors, values, strict=True):
            views += counted_views(value, self._ranges[tensor])
            layers += [part.layer for part in self._ranges[tensor]]
        if not views:
            return
        squares = torch.stack(torch._foreach_norm(views, dtype=torch.float32)).double().square().to(self._device)
        self._sums[name].index_add_(0, torch.tensor(layers, device=self._device), squares)


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _blocks(plan: RunPlan, stage: Stage) -> dict[int, Block]:
    """Return the blocks on this rank by their index in the layer plan; a module of multi-token prediction has one."""
    layers: Mapping[int, Any] = stage.layers
    blocks = {}
    for index, layer in layers.items():
        kind = plan.layers[index].kind
        if kind == "block":
            blocks[index] = layer
        elif kind == "multi_token":
            blocks[index] = layer.block
    return blocks
