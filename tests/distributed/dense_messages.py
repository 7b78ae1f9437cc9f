"""Collectives that refuse strided tensors, as NCCL's do. Gloo sends the memory under a view in silence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

_COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv"),
)


def refuse_strided_tensors() -> None:
    """Let the collectives of this process raise ValueError for tensors that are not contiguous."""
    for name in _COLLECTIVES:
        checked = _checked(name, getattr(dist, name))
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, checked)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        for value in _pytree.tree_leaves((args, named)):
            if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_contiguous():
                shape, strides = tuple(value.shape), value.stride()
                raise ValueError(f"{name} got shape {shape} with strides {strides}: gloo sends other numbers")
        return function(*args, **named)

    return call
