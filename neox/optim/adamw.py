"""AdamW, with clipping by the true global gradient norm where DeepSpeed's own would be wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from neox.config import RunPlan
from neox.errors import ConfigError
from neox.optim.groups import parameter_groups


@dataclass(frozen=True)
class NormScope:
    """How this rank takes part in the norm of the whole model's gradient.

    group: the ranks that together hold one copy of the model (pipeline stages x tensor ranks), None for one rank.
    counts: whether this rank counts a parameter: each parameter is counted once over the group, so not a tensor rank's
        copy of a replicated one, nor a second stage's copy of a tied one.
    """

    group: dist.ProcessGroup | None
    counts: Callable[[torch.Tensor], bool]


class ClippingAdamW(torch.optim.AdamW):
    """AdamW that clips by the global norm over all ranks of a model, and leaves weights alone when it is not finite.

    DeepSpeed counts replicated parameters on the first stage only when it clips in fp32, and forgets which parameters
    are split or tied when it clips in fp16; both with ZeRO 0, where whole parameters reach the optimizer: here.
    `overflow` and `_global_grad_norm` are the attributes DeepSpeed reads after a step.
    """

    def __init__(self, groups: list[dict[str, Any]], *, max_norm: float, scope: NormScope, **kwargs: Any) -> None:
        super().__init__(groups, **kwargs)
        self.max_norm = max_norm
        self.overflow = False
        self._global_grad_norm = 0.0
        self._group = scope.group
        # By position: DeepSpeed replaces the parameters by fp32 copies that carry no attributes.
        self._counted = [[scope.counts(p) for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Clip and update; with a norm that is not finite set `overflow` and change nothing."""
        self._global_grad_norm = self.global_norm()
        self.overflow = not math.isfinite(self._global_grad_norm)
        if self.overflow:
            return None
        if 0.0 < self.max_norm < self._global_grad_norm:
            scale = self.max_norm / (self._global_grad_norm + 1e-6)
            torch._foreach_mul_([p.grad for g in self.param_groups for p in g["params"] if p.grad is not None], scale)
        return super().step(closure)

    @property
    def last_norm(self) -> float:
        """The global gradient norm of the last step, before clipping."""
        return self._global_grad_norm

    def global_norm(self) -> float:
        """Return the L2 norm of the whole model's gradient, the same on every rank of the group."""
        counted = [
            p.grad.float()
            for group, counts in zip(self.param_groups, self._counted, strict=True)
            for p, count in zip(group["params"], counts, strict=True)
            if count and p.grad is not None
        ]
        device = self.param_groups[0]["params"][0].device
        total = torch.zeros((), dtype=torch.float32, device=device)
        if counted:
            total += torch.stack(torch._foreach_norm(counted)).square().sum()
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return math.sqrt(squared) if (squared := total.item()) >= 0 else math.nan


def build_optimizer(
    plan: RunPlan, named_parameters: Iterable[tuple[str, nn.Parameter]], clip: NormScope | None = None
) -> torch.optim.AdamW:
    """Return AdamW (decoupled decay, torch's fused kernel) over NeoX's two groups, at learning rate 0 until scheduled.

    clip: given where this optimizer clips and guards itself (ZeRO 0); otherwise DeepSpeed's wrapper does.
    Raises ConfigError for a kind of optimizer that does not exist here.
    """
    settings = plan.config.optimizer.optimizer
    if settings.type.lower() not in ("adam", "adamw"):
        raise ConfigError(
            f"optimizer.type is {settings.type!r}: only Adam and AdamW exist here (both with decoupled weight decay)"
        )
    decay = settings.params.weight_decay
    groups = parameter_groups(named_parameters, plan.config.optimizer.weight_decay if decay is None else decay)
    kwargs: dict[str, Any] = {"lr": 0.0, "betas": settings.params.betas, "eps": settings.params.eps, "fused": True}
    if clip is None:
        return torch.optim.AdamW(groups, **kwargs)
    return ClippingAdamW(groups, max_norm=plan.config.deepspeed.gradient_clipping, scope=clip, **kwargs)
