"""AdamW: parameter groups, and clipping by the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from neox.config import RunPlan
from neox.errors import ConfigError


def decays(parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies: to matrices, not to vectors (biases and norms), as in gpt-neox.

    The same as `ParameterSpec.decay` of the layer plan, derived from the tensor so that it holds on every rank.
    """
    # Under ZeRO-3 a partitioned parameter is an empty tensor; DeepSpeed keeps its full shape in ds_shape.
    return len(getattr(parameter, "ds_shape", parameter.shape)) > 1


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into torch optimizer groups: first those with weight decay, then those without.

    Args:
        named_parameters: Parameters in the order that each group keeps; frozen ones are left out.
        weight_decay: Decay of the first group; the second has 0.

    Returns:
        The groups that have members.
    """
    parameters = [p for _, p in named_parameters if p.requires_grad]
    groups = (
        {"params": [p for p in parameters if decays(p)], "weight_decay": weight_decay},
        {"params": [p for p in parameters if not decays(p)], "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]


@dataclass(frozen=True)
class NormScope:
    """Which ranks and parameters contribute to the norm of the model's gradient.

    Attributes:
        group: Ranks that together hold one copy of the model (pipeline stages x tensor ranks); None for one rank.
        counts: Whether this rank counts a parameter. Over the group each parameter is counted once: replicated ones on
            tensor rank 0 alone, a tied one on its first stage alone.
    """

    group: dist.ProcessGroup | None
    counts: Callable[[Tensor], bool]


class ClippingAdamW(torch.optim.AdamW):
    """AdamW that clips by the global norm over all ranks of a model, and skips a step whose norm is not finite.

    Used with ZeRO 0, where DeepSpeed's own norm is wrong: it counts replicated parameters on the first stage only when
    it clips in fp32, and does not see which parameters are split or tied when it clips in fp16. `overflow` and
    `_global_grad_norm` are the attributes that DeepSpeed reads after a step.

    Args:
        groups: Parameter groups of `parameter_groups`.
        max_norm: Norm above which gradients are scaled down to it; 0 never clips.
        scope: Ranks and parameters of the norm.
        kwargs: Passed to `torch.optim.AdamW`.
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
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Clip and update; if the norm is not finite, set `overflow` and change nothing."""
        self._global_grad_norm = self.global_norm()
        self.overflow = not math.isfinite(self._global_grad_norm)
        if self.overflow:
            return None
        if 0.0 < self.max_norm < self._global_grad_norm:
            scale = self.max_norm / (self._global_grad_norm + 1e-6)
            torch._foreach_mul_([p.grad for g in self.param_groups for p in g["params"] if p.grad is not None], scale)
        result: float | None = super().step(closure)
        return result

    @property
    def last_norm(self) -> float:
        """Global gradient norm of the last step, before clipping."""
        return self._global_grad_norm

    def global_norm(self) -> float:
        """Return the L2 norm of the model's gradient, the same on every rank of the group."""
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
    """Build AdamW (decoupled weight decay, torch's fused kernel); its learning rate is 0 until scheduled.

    Args:
        plan: The run.
        named_parameters: This rank's parameters.
        clip: Scope of the norm where this optimizer clips (ZeRO 0); None where DeepSpeed's wrapper does.

    Raises:
        ConfigError: For another type of optimizer.
    """
    settings = plan.config.optimizer.optimizer
    if settings.type.lower() not in ("adam", "adamw"):
        raise ConfigError(
            f"optimizer.type is {settings.type!r}, which is not supported; set Adam or AdamW (the same here: both "
            "with decoupled weight decay)"
        )
    decay = settings.params.weight_decay
    groups = parameter_groups(named_parameters, plan.config.optimizer.weight_decay if decay is None else decay)
    kwargs: dict[str, Any] = {"lr": 0.0, "betas": settings.params.betas, "eps": settings.params.eps, "fused": True}
    if clip is None:
        return torch.optim.AdamW(groups, **kwargs)
    return ClippingAdamW(groups, max_norm=plan.config.deepspeed.gradient_clipping, scope=clip, **kwargs)
