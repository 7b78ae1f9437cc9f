"""Computation in fp64, also in code that asks for fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class DoublePrecision(TorchFunctionMode):
    """Inside it, every call that asks for fp32 gets fp64: norms, softmax and rotary positions of modules in fp64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*tree_map(_wider, args), **tree_map(_wider, kwargs or {}))


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
