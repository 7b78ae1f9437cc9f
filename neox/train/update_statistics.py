"""Global statistics of each update: norm of the weights, zeros in the gradients, norms of the optimizer states."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from neox.engine import Engine
from neox.engine.stability import Part, counted_parts
from neox.plan import RunPlan
from neox.train.callbacks import Callback, StepReport, TrainState

_ZEROS = "zeros"
_ELEMENTS = "elements"
_WEIGHTS = "weights"


def observes_updates(plan: RunPlan) -> bool:
    """Return whether a run logs any of these statistics."""
    keys = plan.config.logging
    return keys.log_param_norm or keys.log_grad_pct_zeros or keys.log_optimizer_states


class UpdateStatistics(Callback):
    """Callback on every rank that computes statistics of the optimizer's fp32 tensors. Skipped updates have none."""

    def __init__(self, plan: RunPlan, engine: Engine) -> None:
        """Register hooks with the optimizer.

        Args:
            plan: The run.
            engine: Its engine.
        """
        self._keys = plan.config.logging
        self._engine = engine
        wrapper = engine.deepspeed_engine.optimizer
        module = engine.deepspeed_engine.module
        self._parts = counted_parts(plan, engine.grid, module, wrapper, engine.optimizer)
        self._is_divided = hasattr(wrapper, "dp_process_group")
        self._updated: list[Tensor] = []
        self._sums: dict[str, float] = defaultdict(float)
        engine.optimizer.register_step_pre_hook(self._before_update)
        engine.optimizer.register_step_post_hook(self._after_update)

    def step_scalars(self, state: TrainState, report: StepReport) -> Mapping[str, float]:
        """Return the statistics of the step, from the sums of all ranks."""
        own = dict(self._sums)
        if not self._is_divided and self._engine.grid.dp_rank > 0:  # data ranks update the same tensors
            own = {}
        self._sums.clear()
        sums: dict[str, float] = defaultdict(float)
        for part in self._engine.gather(own):
            for name, value in part.items():
                sums[name] += value
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
    def _before_update(self, *_: Any) -> None:
        """Remember the tensors that are about to be updated, and count the zeros in their gradients."""
        self._updated = []
        for group in self._engine.optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None and self._parts.get(tensor):
                    self._updated.append(tensor)
        if not self._keys.log_grad_pct_zeros:
            return
        for tensor in self._updated:
            assert tensor.grad is not None
            for view in _views(tensor.grad, self._parts[tensor]):
                self._sums[_ZEROS] += float((view == 0).sum())
                self._sums[_ELEMENTS] += view.numel()

    @torch.no_grad()
    def _after_update(self, *_: Any) -> None:
        """Add up the squares of the weights and of the optimizer states."""
        for tensor in self._updated:
            if self._keys.log_param_norm:
                self._add(_WEIGHTS, tensor, tensor)
            if not self._keys.log_optimizer_states:
                continue
            for name, value in self._engine.optimizer.state[tensor].items():
                if _is_elementwise_state(value, tensor):
                    self._add(str(name), tensor, value)
        self._updated = []

    def _add(self, name: str, tensor: Tensor, value: Tensor) -> None:
        for view in _views(value, self._parts[tensor]):
            self._sums[name] += float(torch.linalg.vector_norm(view, dtype=torch.float64)) ** 2


def _is_elementwise_state(value: Any, tensor: Tensor) -> bool:
    """Return whether an optimizer state has one number for each element of its tensor."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.numel() == tensor.numel() > 1


def _views(value: Tensor, parts: list[Part]) -> Iterator[Tensor]:
    """Yield the parts of a tensor that this rank counts. Its shape is that of one of the optimizer's tensors."""
    flat = value.detach().reshape(-1)
    for part in parts:
        yield flat[part.start : part.start + part.length]
