"""Global statistics of each update: norm of the weights, zeros in the gradients, norms of the optimizer states."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from neox.engine import (
    Engine,
    Feature,
    RunStart,
    StepResult,
    TrainedModel,
    counted_views,
    sum_over_ranks,
    updated_tensors,
)

_ZEROS = "zeros"
_ELEMENTS = "elements"
_WEIGHTS = "weights"


def build(model: TrainedModel, start: RunStart) -> UpdateStatistics | None:
    """Return the statistics; None if none is logged."""
    keys = model.plan.config.logging
    if keys.log_param_norm or keys.log_grad_pct_zeros or keys.log_optimizer_states:
        return UpdateStatistics(model)
    return None


class UpdateStatistics(Feature):
    """Statistics of the optimizer's fp32 tensors. Skipped updates have none."""

    def __init__(self, model: TrainedModel) -> None:
        self._keys = model.plan.config.logging
        self._optimizer = model.optimizer
        self._ranges = model.counted_ranges()
        self._updated: list[Tensor] = []
        self._found: dict[str, list[Tensor]] = defaultdict(list)  # numbers on the device, of all views of the step
        self._elements = 0

    def after_step(self, engine: Engine, result: StepResult) -> Mapping[str, float]:
        """Return the statistics of the step, from the sums of all ranks; none if the update was skipped."""
        if result.update_skipped:  # our optimizer finds an overflow of fp32 only inside of its step
            self._take()
            return {}
        sums = sum_over_ranks(engine, self._take())
        elements = sums.pop(_ELEMENTS, 0.0)
        zeros = sums.pop(_ZEROS, 0.0)
        weights = sums.pop(_WEIGHTS, None)
        values: dict[str, float] = {}
        if weights is not None:
            values["train/param_norm"] = math.sqrt(weights)
        if elements:
            values["train/grad_pct_zeros"] = 100.0 * zeros / elements
        for name, square in sorted(sums.items()):
            values[f"optimizer/{name}_norm"] = math.sqrt(square)
        return values

    @torch.no_grad()
    def before_update(self, engine: Engine) -> None:
        """Remember the tensors that are about to be updated, and count the zeros in their gradients."""
        self._updated = updated_tensors(self._optimizer, self._ranges)
        if not self._keys.log_grad_pct_zeros:
            return
        for tensor in self._updated:
            assert tensor.grad is not None
            for view in counted_views(tensor.grad, self._ranges[tensor]):
                self._found[_ZEROS].append((view == 0).sum().double())
                self._elements += view.numel()

    @torch.no_grad()
    def after_update(self, engine: Engine) -> None:
        """Add up the squares of the weights and of the optimizer states."""
        for tensor in self._updated:
            if self._keys.log_param_norm:
                self._add(_WEIGHTS, tensor, tensor)
            if not self._keys.log_optimizer_states:
                continue
            for name, value in self._optimizer.state[tensor].items():
                if _is_elementwise_state(value, tensor):
                    self._add(str(name), tensor, value)
        self._updated = []

    def _add(self, name: str, tensor: Tensor, value: Tensor) -> None:
        for view in counted_views(value, self._ranges[tensor]):
            self._found[name].append(torch.linalg.vector_norm(view, dtype=torch.float64).square())

    def _take(self) -> dict[str, float]:
        """Return this rank's sums of the step by name, and forget them. The host waits once for all numbers."""
        sums: dict[str, float] = {}
        if self._found:
            totals = [torch.stack(numbers).sum() for numbers in self._found.values()]
            sums.update(zip(self._found, torch.stack(totals).tolist(), strict=True))
        if self._elements:
            sums[_ELEMENTS] = float(self._elements)
        self._found.clear()
        self._elements = 0
        return sums


def _is_elementwise_state(value: Any, tensor: Tensor) -> bool:
    """Return whether an optimizer state has one number for each element of its tensor; a count of steps is a scalar."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.dim() > 0 and value.numel() == tensor.numel()
