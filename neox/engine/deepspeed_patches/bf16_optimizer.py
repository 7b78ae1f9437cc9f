"""DeepSpeed's optimizer of bf16 weights with fp32 copies, with fewer passes over memory and one wait for the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

from neox.engine.deepspeed_patches.range_reduction import LayerReduction
from neox.optim import EXPERTS, ExpertGroups


class BF16Optimizer(BF16_Optimizer):  # type: ignore[misc]
    """Optimizer of bf16 weights whose fp32 copies are divided over data ranks: ZeRO 1, and pipeline stages with ZeRO 0.

    With `bf16.immediate_grad_update` a gradient is added to the accumulated ones, and released, as soon as the backward
    pass has it. The numbers are DeepSpeed's, except for stages with ZeRO 0, whose gradients are accumulated in bf16:
    there DeepSpeed rounds the factor that clips them to bf16, too.

    With expert parallelism, experts have their own parameter groups, whose fp32 copies are sharded over the ranks with
    the same experts. DeepSpeed finds these ranks only for its own MoE layers, and omits experts from the norm.

    Attributes:
        layer_reduction: What reduces gradients during the last backward pass of a step; None if that follows the pass.

    Args:
        *args: DeepSpeed's arguments.
        experts: Process groups of expert parallelism; None if each rank has all experts.
        **kwargs: DeepSpeed's arguments by name.
    """

    def __init__(self, *args: Any, experts: ExpertGroups | None = None, **kwargs: Any) -> None:
        self.layer_reduction: LayerReduction | None = None
        self.experts = experts  # DeepSpeed's constructor calls `_configure_moe_settings`
        super().__init__(*args, **kwargs)

    def _configure_moe_settings(self) -> None:
        """Shard the states of experts over the ranks that hold the same experts."""
        assert self.experts is not None
        self.expert_gradients: dict[str, list[Tensor]] = {EXPERTS: []}
        for number, group in enumerate(self.optimizer.param_groups):
            if group.get("moe"):
                self.real_dp_process_group[number] = self.experts.same

    def average_experts(self, data_ranks: int) -> None:
        """Average the accumulated gradients of experts, which are sums over the expert parallel ranks.

        Args:
            data_ranks: Total number of data ranks.
        """
        if not self.has_moe_layers or self.experts is None:
            return
        for gradients in self.expert_gradients[EXPERTS]:
            dist.all_reduce(gradients, group=self.experts.same)
            gradients /= data_ranks

    @torch.no_grad()
    def _update_hp_grad(self, lp: Tensor, group_idx: int, param_idx: int, clear_lp_grads: bool) -> None:
        """Add a parameter's gradient to the accumulated one in one kernel, without a copy in fp32.

        That moves 10 bytes for each element. DeepSpeed's cast and sum move 18.
        """
        if lp.grad is None:
            return
        accumulated: Tensor = self.fp32_groups_gradients[group_idx][param_idx]
        accumulated.add_(lp.grad.reshape(-1))
        lp._hp_grad = accumulated  # type: ignore[attr-defined]  # read where copies of tied weights are summed
        self.fp32_groups_has_gradients[group_idx][param_idx] = True
        if clear_lp_grads:
            lp.grad.zero_()
        if self.layer_reduction is not None:
            self.layer_reduction.gradient_arrived(lp)  # type: ignore[arg-type]  # DeepSpeed's lists say Tensor

    @property
    def accumulated_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter and its accumulated gradient, in DeepSpeed's order."""
        for weights, gradients in zip(self.bf16_groups, self.fp32_groups_gradients, strict=True):
            yield from zip(weights, gradients, strict=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Clip and update. A step whose norm is not finite changes nothing and sets `overflow`.

        The host waits for the device once, and only the gradients of this rank's part are clipped, because only these
        are used. DeepSpeed waits several times and clips all gradients. Its engine always calls `zero_grad` afterwards.
        """
        norm, factor = self._norm_and_factor()
        self.overflow = not math.isfinite(norm)
        self._global_grad_norm = math.inf if self.overflow else norm
        if self.overflow:
            return
        if self.clip_grad > 0.0 and factor < 1.0:
            torch._foreach_mul_(self.fp32_groups_gradient_flat_partition, factor)
        parts = list(zip(self.fp32_groups_flat_partition, self.fp32_groups_gradient_flat_partition, strict=True))
        for weights, gradients in parts:
            weights.grad = gradients.to(weights.dtype)  # the same tensor, unless gradients are accumulated in bf16
        self.optimizer.step()
        if self.grad_acc_dtype is not torch.float32:
            for weights, _ in parts:
                weights.grad = None
        self._lazy_init_hp_params_optimizer_state()
        self.update_lp_params()

    def _norm_and_factor(self) -> tuple[float, float]:
        """Return the norm of the model's gradient and the factor that clips it, both as computed in fp32."""
        gradients, expert_gradients = self.get_grads_for_norm()
        square = self._square(gradients)
        if self.experts is not None:
            expert_square = self._square(expert_gradients.get(EXPERTS, []))
            dist.all_reduce(expert_square, group=self.experts.divided)
            square += expert_square
        if self.mpu is not None and self.mpu.get_model_parallel_world_size() > 1:
            dist.all_reduce(square, group=self.mpu.get_model_parallel_group())
        norm = square.sqrt()
        first, second = torch.stack([norm, self.clip_grad / (norm + 1e-6)]).tolist()
        return first, second

    def _square(self, gradients: list[Tensor]) -> Tensor:
        """Return the sum of the squares of gradients."""
        if not gradients:
            return torch.zeros((), device=self.fp32_groups_gradients_flat[0].device)
        return torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).square().sum()
