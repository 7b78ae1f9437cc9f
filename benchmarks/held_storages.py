"""Meter of the memory that tensors hold on a CPU."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def use_planned_products() -> None:
    """Let this process multiply fp32 matrices with MKL, whose products are added to gradients in place.

    The plan counts this library. oneDNN, which is chosen on AMD's CPUs, needs one more tensor for each product.
    """
    module = importlib.import_module("neox.ops.linear")  # the name is also that of a function of the package
    module.ONEDNN = False  # type: ignore[attr-defined]


class HeldStorages(TorchDispatchMode):
    """Bytes of the storages that operations have made and something still refers to, and the most so far.

    Args:
        apart_from: Tensors that live as long as the meter, and do not count. (Without them a view of an older tensor
            counts that tensor's storage.)
    """

    def __init__(self, apart_from: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.total = self.peak = 0
        self._older = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in apart_from)}
        self._held: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._hold(tensor.untyped_storage())
        self.peak = max(self.peak, self.total)
        return made

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._held and id(storage) not in self._older:
            self._held[id(storage)] = storage.nbytes()
            self.total += storage.nbytes()
            weakref.finalize(storage, self._release, id(storage))

    def _release(self, key: int) -> None:
        self.total -= self._held.pop(key)
