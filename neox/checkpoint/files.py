"""Files written in small pieces, at the speed of the page cache."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

# Bytes of one write. A longer one takes the kernel's largest free pages, which on a virtual machine are those that the
# host has taken back and gives again slowly (ten times the time of the copy, measured); and it holds the file's lock.
WRITE_BYTES = 128 << 10


class PiecewiseFile:
    """A new file to `torch.save` into, written in pieces of `WRITE_BYTES`.

    failure: the first OSError of a write. torch hides it behind one of its own, so look here.
    """

    def __init__(self, path: Path) -> None:
        self.failure: OSError | None = None
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: BaseException | TracebackType | None) -> None:
        os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> int:
        """Append all of `data`. Raises OSError."""
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            while view:
                view = view[os.write(self._descriptor, view[:WRITE_BYTES]) :]
        except OSError as error:
            self.failure = self.failure or error
            raise
        return size

    def flush(self) -> None:
        """Nothing is held back."""
