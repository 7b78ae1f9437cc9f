"""Base of all optimizers: clipping by the global gradient norm, and skipping of steps that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from neox.config.sections.optimizer_kind import PIECE
from neox.parallel import holds_divided_experts

EXPERTS = "experts"
"""Name of the optimizer's groups of experts that data ranks divide."""


class ExpertGroups(NamedTuple):
    """Data ranks with the same experts, and data ranks that divide all experts."""

    same: dist.ProcessGroup
    divided: dist.ProcessGroup


@dataclass(frozen=True)
class NormScope:
    """Ranks and parameters that contribute to the norm of the model's gradient.

    Attributes:
        group: Ranks that together hold one copy of the model (pipeline stages x tensor ranks); None for one rank.
        counts: Function that says whether this rank counts a parameter. Over the group each parameter is counted once:
            a replicated one only on tensor rank 0, a tied one only on its first stage.
        expert_group: Data ranks that divide experts, over which squares of these are added up; None if none do.
    """

    group: dist.ProcessGroup | None
    counts: Callable[[Tensor], bool]
    expert_group: dist.ProcessGroup | None = None


def pieces(*tensors: list[Tensor], largest: int = PIECE) -> Iterator[list[list[Tensor]]]:
    """Cut lists of tensors into flat parts, so that temporary tensors of their size stay small.

    Args:
        tensors: Lists of contiguous tensors. All lists have the same length, and equal shapes at each position.
        largest: Largest number of elements in the parts that are yielded together.

    Yields:
        Lists of views, in the order of the arguments.
    """
    batch: list[list[Tensor]] = []
    size = 0
    for same in zip(*tensors, strict=True):
        flat = [tensor.view(-1) for tensor in same]
        for start in range(0, flat[0].numel(), largest):
            part = [tensor[start : start + largest] for tensor in flat]
            count = part[0].numel()
            if batch and size + count > largest:
                yield _columns(batch)
                batch = []
                size = 0
            batch.append(part)
            size += count
    if batch:
        yield _columns(batch)


def _columns(rows: list[list[Tensor]]) -> list[list[Tensor]]:
    return [list(column) for column in zip(*rows, strict=True)]


def without_dynamo(method: Any) -> Any:
    """Return a method of torch's optimizers without its wrappers, which import torch._dynamo (5 s of CPU)."""
    while hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method


class WithoutDynamo(torch.optim.Optimizer):
    """torch's base class without the wrappers that import torch._dynamo."""

    add_param_group = without_dynamo(torch.optim.Optimizer.add_param_group)
    load_state_dict = without_dynamo(torch.optim.Optimizer.load_state_dict)
    state_dict = without_dynamo(torch.optim.Optimizer.state_dict)
    zero_grad = without_dynamo(torch.optim.Optimizer.zero_grad)


class ClippedOptimizer(WithoutDynamo):
    """An optimizer that clips by the global norm over all ranks of a model, if it has a scope.

    A step whose norm is not finite is skipped. `overflow` and `_global_grad_norm` are the attributes that DeepSpeed
    reads after a step.

    A subclass updates in `update`, or in `update_group`. The counter of steps is a state of each tensor, because ZeRO 3
    calls `step` once for each of its parts.

    Args:
        groups: Parameter groups of `parameter_groups`.
        max_norm: Norm above which gradients are scaled down to it; 0 never clips.
        scope: Ranks and parameters of the norm; None computes no norm and does not clip.
        options: Arguments of the next class: `defaults`, or those of torch's optimizer that a subclass also is.

    Attributes:
        known_norm: Norm of the next step's gradients, if a wrapper has computed it with `global_norm`; None if not.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, max_norm: float = 0.0, scope: NormScope | None = None, **options: Any
    ) -> None:
        super().__init__(groups, **options)
        self.max_norm = max_norm
        self.scope = scope
        self.overflow = False
        self.known_norm: float | None = None
        self.expert_groups: ExpertGroups | None = None
        self._global_grad_norm = 0.0
        # By position: DeepSpeed replaces the parameters by fp32 copies that carry no attributes.
        self._counted: list[list[bool]] = []
        self._divided: list[list[bool]] = []
        for group in self.param_groups:
            counted = [scope is not None and scope.counts(p) for p in group["params"]]
            divided = list(map(holds_divided_experts, group["params"]))
            self._counted.append([counts and not part for counts, part in zip(counted, divided, strict=True)])
            self._divided.append([counts and part for counts, part in zip(counted, divided, strict=True)])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Clip and update; if the norm is not finite, set `overflow` and change nothing."""
        divisor: Tensor | None = None
        if self.scope is not None:
            norm = self.global_norm() if self.known_norm is None else self.known_norm
            self.known_norm = None
            self._global_grad_norm = norm
            self.overflow = not math.isfinite(norm)
            if self.overflow:
                return None
            if 0.0 < self.max_norm < norm:
                divisor = self._device_scalar((norm + 1e-6) / self.max_norm)
        self.update(divisor)
        return None

    def update(self, divisor: Tensor | None) -> None:
        """Update all parameters that have a gradient.

        Args:
            divisor: Divisor of all gradients; None for 1.
        """
        self.divide_gradients(divisor)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                gradients = [p.grad.contiguous() for p in parameters]
                self.update_group(group, parameters, gradients)

    def update_group(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Update a group's parameters with clipped gradients. All are on one device and of one type."""
        raise NotImplementedError

    def divide_gradients(self, divisor: Tensor | None) -> None:
        """Divide all gradients by a scalar in place."""
        if divisor is None:
            return
        gradients: list[Tensor] = []
        for group in self.param_groups:
            gradients += [p.grad for p in group["params"] if p.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, divisor)

    def states(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        """Return a state in the shape of each parameter; zeros before the first step."""
        found = []
        for parameter in parameters:
            state = self.state[parameter]
            if name not in state:
                state[name] = torch.zeros_like(parameter)
            found.append(state[name])
        return found

    def keep(self, parameter: Tensor, states: dict[str, Tensor]) -> None:
        """Take over a parameter's saved states.

        Args:
            parameter: The parameter.
            states: Its states on its device, and in CPU memory the counter of steps, if there is one; empty before the
                first step.
        """
        self.state[parameter] = states

    @property
    def last_norm(self) -> float:
        """Global gradient norm of the last step, before clipping."""
        return self._global_grad_norm

    def global_norm(self) -> float:
        """Return the L2 norm of the model's gradient, the same on every rank of the group."""
        total = self._square(self.counted_gradients())
        if self.scope is not None and self.scope.expert_group is not None:
            of_experts = self._square(_gradients(self.param_groups, self._divided))
            dist.all_reduce(of_experts, group=self.scope.expert_group)
            total += of_experts
        if self.scope is not None and self.scope.group is not None:
            dist.all_reduce(total, group=self.scope.group)
        square = total.item()
        if not square >= 0:
            return math.nan
        return math.sqrt(square)

    def counted_gradients(self) -> list[Tensor]:
        """Return the gradients that this rank counts in the norm, in fp32, without those of divided experts."""
        return _gradients(self.param_groups, self._counted)

    def _square(self, gradients: list[Tensor]) -> Tensor:
        """Return the sum of the squares of gradients."""
        if not gradients:
            return self._device_scalar(0.0)
        return torch.stack(torch._foreach_norm(gradients)).square().sum()

    def _device_scalar(self, value: float) -> Tensor:
        device = self.param_groups[0]["params"][0].device
        return torch.full((), value, dtype=torch.float32, device=device)


def _gradients(groups: list[dict[str, Any]], wanted: list[list[bool]]) -> list[Tensor]:
    """Return gradients in fp32.

    Args:
        groups: The optimizer's groups.
        wanted: For each parameter of each group, whether its gradient is returned, if it has one.
    """
    gradients = []
    for group, flags in zip(groups, wanted, strict=True):
        for parameter, is_wanted in zip(group["params"], flags, strict=True):
            if is_wanted and parameter.grad is not None:
                gradients.append(parameter.grad.float())
    return gradients
