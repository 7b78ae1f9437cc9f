"""Tokens of all context ranks that no forward pass keeps: the backward pass gathers them again.

Autograd keeps what a kernel's backward pass needs. If that is a view of the gathered tensor, it keeps this rank's
tokens and the shape of the view instead. So the memory of keys and values is divided over context ranks, too, and each
backward pass gathers them once more, for one block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neox.parallel.context_ranks import gather_context
from neox.parallel.grid import ParallelGrid


class _View(NamedTuple):
    """A view of the gathered tensor.

    Attributes:
        shape: Its shape.
        stride: Its stride.
        offset: Index of its first number in the storage.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def gathered_context(k: Tensor, v: Tensor, grid: ParallelGrid) -> Iterator[tuple[Tensor, Tensor]]:
    """Join the keys and values of all context ranks for what is computed in the context.

    Gradients are summed and divided. The joined tensors are not kept for the backward pass, except in compiled code,
    where the compiler decides what is kept.

    Args:
        k: Keys of this rank's tokens [B, S/C, K, D].
        v: Values, in the same shape.
        grid: Process groups.

    Yields:
        Keys and values of all tokens in order, [B, S, K, D].
    """
    own = torch.cat((k, v), dim=2)
    whole = gather_context(own, grid)
    all_k, all_v = whole.chunk(2, dim=2)
    if torch.compiler.is_compiling() or not whole.requires_grad:
        yield all_k, all_v
        return
    kept = _KeptParts(own.detach(), whole, grid)
    for part in (all_k, all_v):
        part.register_hook(kept.count_gradient)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        yield all_k, all_v


class _KeptParts:
    """How autograd keeps views of a gathered tensor, and other tensors as the context around it says.

    It refers to no tensor that refers to it, so that everything is released with the graph.

    Args:
        own: Keys and values of this rank's tokens [B, S/C, 2K, D].
        whole: Those of all tokens [B, S, 2K, D].
        grid: Process groups.
    """

    def __init__(self, own: Tensor, whole: Tensor, grid: ParallelGrid) -> None:
        self._own = own
        self._packed_own: Any = None
        self._storage = whole.untyped_storage().data_ptr()
        self._grid = grid
        self._again: Tensor | None = None
        self._gradients_to_come = 2
        self._pack_outside, self._unpack_outside = _hooks_around()

    def pack(self, x: Tensor) -> Any:
        """Return what is kept of a tensor."""
        if x.untyped_storage().data_ptr() != self._storage:
            return self._pack_outside(x)
        if self._packed_own is None:
            self._packed_own = self._pack_outside(self._own)
            del self._own
        return _View(x.shape, x.stride(), int(x.storage_offset()))

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor again."""
        if not isinstance(packed, _View):
            return self._unpack_outside(packed)
        if self._again is None:
            own = self._unpack_outside(self._packed_own)
            with torch.no_grad():
                self._again = gather_context(own, self._grid)
        return self._again.as_strided(*packed)

    def count_gradient(self, gradient: Tensor) -> None:
        """Release all tokens if the gradients of both keys and values are complete: nothing needs them any more."""
        self._gradients_to_come -= 1
        if self._gradients_to_come == 0:
            self._again = None
            self._gradients_to_come = 2


def _hooks_around() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the hooks by which autograd keeps tensors here, such as those of recomputation. Hooks do not nest."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if found is None:
        return _same, _same
    return found


def _same(x: Tensor) -> Tensor:
    return x
