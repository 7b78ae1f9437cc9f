"""Copies from a device to the host that arrive while the host computes with the ones before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor


class Arrivals:
    """Copies of tensors of a device in CPU memory, piece by piece.

    Two pinned buffers take turns: one piece arrives while the one before is read. A copy to other memory is several
    times slower.

        device   | piece 0 | piece 1 | piece 2 | ...
        host               | piece 0 | piece 1 | ...

    Attributes:
        piece: Elements of a piece.
    """

    def __init__(self, piece: int = 2**24) -> None:
        self.piece = piece
        self._buffers: dict[tuple[torch.dtype, int], Tensor] = {}

    def beside(self, here: Sequence[Tensor], tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pieces of flat tensors with those of other tensors of equal length on the same device.

        Args:
            here: Tensors in the memory that pieces are wanted in.
            tensors: Tensors of any device. A piece of them is valid until the second next one is asked for.
        """
        pending: tuple[Tensor, Tensor, Any] | None = None
        turn = 0
        for target, source in zip(here, tensors, strict=True):
            if target.device == source.device:
                yield target, source
                continue
            for part, wanted in zip(target.split(self.piece), source.split(self.piece), strict=True):
                buffer = self._buffer(wanted.dtype, turn)[: wanted.numel()]
                buffer.copy_(wanted, non_blocking=True)
                copied = get_accelerator().Event()
                copied.record()
                if pending is not None:
                    yield self._arrived(pending)
                pending = (part, buffer, copied)
                turn = 1 - turn
        if pending is not None:
            yield self._arrived(pending)

    def _arrived(self, pending: tuple[Tensor, Tensor, Any]) -> tuple[Tensor, Tensor]:
        part, buffer, copied = pending
        copied.synchronize()
        return part, buffer

    def _buffer(self, dtype: torch.dtype, turn: int) -> Tensor:
        """Return one of the two buffers of a type."""
        if (dtype, turn) not in self._buffers:
            self._buffers[dtype, turn] = get_accelerator().pin_memory(torch.empty(self.piece, dtype=dtype))
        return self._buffers[dtype, turn]
