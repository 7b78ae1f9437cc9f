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
    """Return whether weight decay applies: to matrices, not to biases and norms, as in gpt-neox.

    Also to tables of positions, which gpt-neox decays too.
    """
    marked: bool | None = getattr(parameter, "decays", None)
    if marked is not None:
        return marked
    # Under ZeRO-3 a partitioned parameter is an empty tensor; DeepSpeed keeps its full shape in ds_shape.
    return len(getattr(parameter, "ds_shape", parameter.shape)) > 1


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into torch optimizer groups: first those with weight decay, then those without.

    Args:
        named_parameters: Parameters in the order that each group keeps; frozen ones are left out.
        weight_decay: Decay of the first group; the second has 0.

    Returns:
        The groups that have members. Those of parameters with a factor of the learning rate (`mark_lr_factor`) come
        first and have it as `lr_factor`; the product of learning rate and weight decay is the same in all.
    """
    parameters = [p for _, p in named_parameters if p.requires_grad]
    factors = sorted({getattr(p, "lr_factor", 1.0) for p in parameters})
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in parameters if decays(p) == decayed and getattr(p, "lr_factor", 1.0) == factor],
            "weight_decay": weight_decay / factor if decayed else 0.0,
        }
        | ({} if factor == 1.0 else {"lr_factor": factor})
        for decayed in (True, False)
        for factor in factors
    ]
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


def _without_dynamo(method: Any) -> Any:
    """Return a method of torch's optimizers without its wrapper, which imports torch._dynamo (5 s of CPU)."""
    return method.__wrapped__


class AdamW(torch.optim.AdamW):
    """AdamW (arXiv:1711.05101) with torch's fused kernel, and clipping by the global norm over all ranks of a model.

    A step whose norm is not finite is skipped. The norm is computed here with ZeRO 0, where DeepSpeed is wrong: it
    counts replicated parameters on the first stage only when it clips in fp32, and does not see which parameters are
    split or tied when it clips in fp16. `overflow` and `_global_grad_norm` are the attributes that DeepSpeed reads
    after a step.

    Args:
        groups: Parameter groups of `parameter_groups`.
        max_norm: Norm above which gradients are scaled down to it; 0 never clips.
        scope: Ranks and parameters of the norm; None computes no norm and does not clip.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
    """

    add_param_group = _without_dynamo(torch.optim.Optimizer.add_param_group)
    load_state_dict = _without_dynamo(torch.optim.Optimizer.load_state_dict)
    state_dict = _without_dynamo(torch.optim.Optimizer.state_dict)
    zero_grad = _without_dynamo(torch.optim.Optimizer.zero_grad)

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        max_norm: float = 0.0,
        scope: NormScope | None = None,
        lr: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self.max_norm = max_norm
        self.scope = scope
        self.overflow = False
        self._global_grad_norm = 0.0
        # By position: DeepSpeed replaces the parameters by fp32 copies that carry no attributes.
        self._counted = [[scope is not None and scope.counts(p) for p in g["params"]] for g in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Clip and update; if the norm is not finite, set `overflow` and change nothing."""
        divisor: Tensor | None = None
        if self.scope is not None:
            self._global_grad_norm = self.global_norm()
            self.overflow = not math.isfinite(self._global_grad_norm)
            if self.overflow:
                return None
            if 0.0 < self.max_norm < self._global_grad_norm:
                divisor = self._device_scalar((self._global_grad_norm + 1e-6) / self.max_norm)
        for group in self.param_groups:
            self._update(group, divisor)
        return None

    def _update(self, group: dict[str, Any], divisor: Tensor | None) -> None:
        """Update one group's parameters, all on one device and of one type; `divisor` divides the gradients."""
        parameters: list[Tensor] = []
        grads: list[Tensor] = []
        means: list[Tensor] = []
        squares: list[Tensor] = []
        steps: list[Tensor] = []
        self._init_group(group, parameters, grads, means, squares, [], steps)
        if not parameters:
            return
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            parameters,
            grads,
            means,
            squares,
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )

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
        total = self._device_scalar(0.0)
        if counted:
            total += torch.stack(torch._foreach_norm(counted)).square().sum()
        if self.scope is not None and self.scope.group is not None:
            dist.all_reduce(total, group=self.scope.group)
        return math.sqrt(squared) if (squared := total.item()) >= 0 else math.nan

    def _device_scalar(self, value: float) -> Tensor:
        device = self.param_groups[0]["params"][0].device
        return torch.full((), value, dtype=torch.float32, device=device)


def build_optimizer(
    plan: RunPlan, named_parameters: Iterable[tuple[str, nn.Parameter]], clip: NormScope | None = None
) -> AdamW:
    """Build the optimizer; its learning rate is 0 until it is scheduled.

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
    params = settings.params
    max_norm = plan.config.deepspeed.gradient_clipping if clip is not None else 0.0
    return AdamW(groups, max_norm=max_norm, scope=clip, betas=params.betas, eps=params.eps)
