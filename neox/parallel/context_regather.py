"""Gathered keys and values of context ranks that are not kept for the backward pass, which gathers them again.

Autograd saves the tensors that a kernel's backward pass needs. Instead of a view of the gathered tensor, the hooks here
save this rank's own tokens and the shape of the view. So the saved keys and values take 1/C of the memory on each of C
context ranks, and the backward pass of each block gathers them once more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neox.parallel.context_ranks import gather_context
from neox.parallel.grid import ParallelGrid


class _View(NamedTuple):
    """Geometry of a view of the gathered tensor.

    Attributes:
        shape: Shape of the view.
        stride: Stride of the view.
        offset: Index of its first element in the storage.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def gathered_context(k: Tensor, v: Tensor, grid: ParallelGrid) -> Iterator[tuple[Tensor, Tensor]]:
    """Gather the keys and values of all context ranks for the attention computed inside the `with` block.

    The backward pass reduce-scatters their gradients. The gathered tensors are not saved for the backward pass, except
    in compiled code, where the compiler decides what is saved.

    Args:
        k: Keys of this rank's tokens [B, S/C, K, D], with K key heads.
        v: Values, in the same shape, or of another width [B, S/C, K, V].
        grid: Process groups.

    Yields:
        Keys [B, S, K, D] and values [B, S, K, V] of all tokens in order.
    """
    if k.shape == v.shape:
        own = torch.cat((k, v), dim=2)
        whole = gather_context(own, grid)
        all_k, all_v = whole.chunk(2, dim=2)
    else:
        own = torch.cat((k, v), dim=3)
        whole = gather_context(own, grid)
        all_k, all_v = whole.split((k.shape[3], v.shape[3]), dim=3)
    if torch.compiler.is_compiling() or not whole.requires_grad:
        yield all_k, all_v
        return
    saved = _SavedShard(own.detach(), whole, grid)
    # Autograd frees what it saves after the backward pass, but keeps hooks of gradients for as long as a loss is held.
    held = weakref.ref(saved)
    for part in (all_k, all_v):
        part.register_hook(partial(_count_gradient, held))
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        yield all_k, all_v


class _SavedShard:
    """Hooks that save this rank's shard in place of views of the gathered tensor.

    Other tensors go to the hooks of the enclosing context, such as those of activation checkpointing. An object holds
    no tensor that refers back to it, so everything is freed with the graph.

    Args:
        own: Keys and values of this rank's tokens [B, S/C, 2K, D], or [B, S/C, K, D + V].
        whole: Those of all tokens, in the same form.
        grid: Process groups.
    """

    def __init__(self, own: Tensor, whole: Tensor, grid: ParallelGrid) -> None:
        self._own = own
        self._packed_own: Any = None
        self._storage = whole.untyped_storage().data_ptr()
        self._grid = grid
        self._regathered: Tensor | None = None
        self._missing_gradients = 2  # of the keys and of the values
        self._pack_outside, self._unpack_outside = _enclosing_hooks()

    def pack(self, x: Tensor) -> Any:
        """Return the object that autograd saves for a tensor."""
        if x.untyped_storage().data_ptr() != self._storage:
            return self._pack_outside(x)
        if self._packed_own is None:
            self._packed_own = self._pack_outside(self._own)
            del self._own
        return _View(x.shape, x.stride(), int(x.storage_offset()))

    def unpack(self, packed: Any) -> Tensor:
        """Restore a saved tensor."""
        if not isinstance(packed, _View):
            return self._unpack_outside(packed)
        if self._regathered is None:
            own = self._unpack_outside(self._packed_own)
            with torch.no_grad():
                self._regathered = gather_context(own, self._grid)
        return self._regathered.as_strided(*packed)

    def count_gradient(self) -> None:
        """Free the gathered tensor once the gradients of both keys and values are complete."""
        self._missing_gradients -= 1
        if self._missing_gradients == 0:
            self._regathered = None
            self._missing_gradients = 2


def _count_gradient(held: weakref.ref[_SavedShard], gradient: Tensor) -> None:
    saved = held()
    if saved is not None:
        saved.count_gradient()


def _enclosing_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the saved-tensor hooks that are active here. Autograd calls only the innermost hooks, so they are kept."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if found is None:
        return _same, _same
    return found


def _same(x: Tensor) -> Tensor:
    return x
