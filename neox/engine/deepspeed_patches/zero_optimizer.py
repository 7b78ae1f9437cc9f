"""DeepSpeed's ZeRO 1 and 2 with the optimizer in CPU memory, without a wait for the device at each parameter."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.utils import has_inf_or_nan
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor


class ZeroOptimizer(DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """DeepSpeed's optimizer, whose host reads what it found in all gradients together.

    With offload DeepSpeed reads from the device whether each parameter's gradient is finite, in the middle of the
    backward pass, and then the norm of each. Numbers are the same.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._found: dict[torch.device, Tensor] = {}  # whether a gradient on each device was not finite
        super().__init__(*args, **kwargs)

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
