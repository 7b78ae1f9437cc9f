"""DeepSpeed's ZeRO 1 and 2, with one norm of all groups, true places of parameters, and one wait for offloaded ones."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.utils import combine_grad_norm_groups, has_inf_or_nan
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.mixed_precision_linkage import link_hp_params
from torch import Tensor


class ZeroOptimizer(DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """DeepSpeed's optimizer whose gradients, or states too, are sharded over data ranks.

    Three things differ:

    - DeepSpeed all-reduces a norm for each parameter group, over data ranks and over all ranks of a model. Pipeline
      stages have groups of their own, so they would wait for each other for ever. Here one norm covers all groups.
    - With `round_robin_gradients` DeepSpeed reorders the parameters of a group before it flattens them, and then notes
      where each parameter is as if it had not. Its notes go into checkpoints. Here they follow the real order.
    - With offload DeepSpeed reads from the device whether each parameter's gradient is finite, in the middle of the
      backward pass, and then the norm of each. Here the host reads all of them together.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._found: dict[torch.device, Tensor] = {}  # whether a gradient on each device was not finite
        super().__init__(*args, **kwargs)

    def scaled_global_norm(self, norm_type: float = 2) -> Tensor:
        """Return the L2 norm of the model's gradient, times the loss scale; infinity if it is not finite."""
        parameters: list[Tensor] = []
        gradients: list[Tensor] = []  # of the parts of parameters on this rank, without padding
        for number, in_partition in enumerate(self.params_in_partition):
            parameters += in_partition
            if not self.cpu_offload:
                parts = [part for part in self.averaged_gradients[number] if not getattr(part, "_zero_padding", False)]
                gradients += parts[: len(in_partition)]  # padding without DeepSpeed's mark is at the end
        if self.cpu_offload:
            norm = self.complete_grad_norm_calculation_for_cpu_offload(parameters)
        else:
            norm = self.get_grad_norm_direct(gradients, parameters, norm_type)
        found: Tensor = combine_grad_norm_groups([norm], norm_type)
        return found

    def _link_all_hp_params(self) -> None:
        """Note for each parameter which part of it is where in this rank's flat tensors."""
        if self.cpu_offload:
            self._get_offload_gradient_dict()
        for number, weights in enumerate(self.bit16_groups):
            group = self.real_dp_process_group[number]
            partition_size = self.partition_size[number]
            offsets = self.round_robin_bit16_offsets[number]
            link_hp_params(
                lp_param_list=weights,
                flat_hp_partition=self.single_partition_of_fp32_groups[number],
                gradient_dict=self.averaged_gradients,
                offload_gradient_dict=self.offload_gradient_dict,
                use_offload=self.cpu_offload,
                param_group_index=number,
                partition_start=torch.distributed.get_rank(group) * partition_size,
                partition_size=partition_size,
                dp_group=group,
                param_offsets=[offsets[self.round_robin_bit16_indices[number][index]] for index in range(len(weights))],
            )

    @property
    def local_overflow(self) -> bool:
        """Whether a gradient of this rank is not finite since this was set to False; the host waits."""
        return any(map(bool, self._found.values()))

    @local_overflow.setter
    def local_overflow(self, value: bool) -> None:
        assert not value, "DeepSpeed sets it in update_offload_overflow_tracker, which is ours"
        self._found = {}

    def update_offload_overflow_tracker(self, grad: Tensor | None) -> None:
        """Remember whether a gradient is not finite."""
        if grad is None:
            return
        found = has_inf_or_nan(grad.data)
        if grad.device in self._found:
            found = self._found[grad.device] | found
        self._found[grad.device] = found

    def complete_grad_norm_calculation_for_cpu_offload(self, params: list[Tensor]) -> Tensor:
        """Return the norm of the gradients of parameters, after the norms of all of them were copied at once."""
        on_device = {name: norm for name, norm in self.norm_for_param_grads.items() if norm.device.type != "cpu"}
        if on_device:
            copied = torch.stack(tuple(on_device.values())).cpu()
            self.norm_for_param_grads.update(zip(on_device, copied.unbind(), strict=True))
        norm: Tensor = super().complete_grad_norm_calculation_for_cpu_offload(params)
        return norm
