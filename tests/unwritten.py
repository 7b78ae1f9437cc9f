"""Memory that starts as NaN, so that a test sees what nothing was written to."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ALLOCATING = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


class UnwrittenIsNaN(TorchFunctionMode):
    """Inside it, floating-point tensors without contents are full of NaN."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        result = function(*args, **(kwargs or {}))
        if function in _ALLOCATING and result.is_floating_point() and result.device.type != "meta":
            result.fill_(torch.nan)
        return result
