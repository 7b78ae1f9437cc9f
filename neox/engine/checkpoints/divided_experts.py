"""State of the optimizer for experts that data ranks divide, as checkpoints hold it: of all experts.

Without ZeRO DeepSpeed writes the optimizer's state of data rank 0 only. So that a checkpoint does not depend on the
expert degree, the states of its experts are replaced by those of all experts before they are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from neox.engine.engine import Engine
from neox.optim import planned_groups
from neox.parallel import gather_experts, holds_divided_experts


@dataclass(frozen=True)
class WholeStates:
    """The optimizer's tensors of all experts, by their place in the optimizer's state.

    Attributes:
        states: Number of a parameter in torch's state dict -> its states by name.
        weights: Number of a group and position in it -> fp32 weights, for wrappers that keep copies of weights.
    """

    states: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    weights: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)

    def put_into(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with these tensors in place of this rank's."""
        if "optimizer_state_dict" in state:
            copies = [list(group) for group in state["fp32_groups"]]
            for (group, position), weight in self.weights.items():
                copies[group][position] = weight
            inner = self._with_states(state["optimizer_state_dict"])
            return {**state, "optimizer_state_dict": inner, "fp32_groups": copies}
        return self._with_states(state)

    def _with_states(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {**state, "state": {**state["state"], **self.states}}


@torch.no_grad()
def gather_states(engine: Engine) -> WholeStates:
    """Gather the optimizer's tensors of experts; all ranks call it together. Only the first data rank keeps them."""
    grid = engine.grid
    if grid.ep_size == 1 or engine.model.divides_optimizer:
        return WholeStates()
    states: dict[int, dict[str, Tensor]] = {}
    weights: dict[tuple[int, int], Tensor] = {}
    number = 0
    planned = planned_groups(engine.plan, engine.deepspeed_engine.module.named_parameters())
    for index, (group, inner) in enumerate(zip(planned, engine.optimizer.param_groups, strict=True)):
        for position, parameter in enumerate(group["params"]):
            tensor = inner["params"][position]
            if holds_divided_experts(parameter):
                whole = {}
                for name, value in engine.optimizer.state[tensor].items():
                    is_elementwise = value.shape == tensor.shape
                    whole[name] = gather_experts(value, grid) if is_elementwise else value
                weight = gather_experts(tensor.detach(), grid)
                if grid.dp_rank == 0:
                    states[number] = whole
                    weights[index, position] = weight
            number += 1
    return WholeStates(states, weights)
