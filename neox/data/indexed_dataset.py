"""Token sequences in a `.bin`, found through its `.idx`: memory-mapped, so 300 billion tokens open at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from neox.data.index_format import Layout, bin_path, idx_path, read_index
from neox.errors import DataError


class IndexedDataset:
    """Read-only sequences of token ids; both layouts are read through the page cache, nothing is loaded ahead.

    prefix: path without `.bin` and `.idx`. data_impl: `infer` takes what the file is; `mmap`, or `cached` and `lazy`
        (one layout, two names), insist.
    Attributes: `dtype`; `sizes` [sequences] in tokens; `document_index` [documents + 1]; `tokens`, all ids as one flat
        array; `num_tokens`.
    Raises DataError for files that are missing or broken, or of another layout than asked for.
    """

    def __init__(self, prefix: str | Path, data_impl: str = "infer") -> None:
        self.prefix = str(prefix)
        index = read_index(prefix)
        self.layout: Layout = index.layout
        wanted = {"infer": index.layout, "lazy": "cached"}.get(data_impl, data_impl)
        if wanted != index.layout:
            raise DataError(
                f'{prefix}.idx is in the {index.layout} layout, but "data_impl" is "{data_impl}"; use "infer"'
            )
        self.dtype = index.dtype
        self.sizes = index.sizes
        self.document_index = index.document_index
        self.num_tokens = index.num_tokens
        self._pointers = index.pointers
        self._unit = index.dtype.itemsize // index.pointer_unit
        self.tokens: np.ndarray = np.empty(0, self.dtype)
        if self.num_tokens:
            self.tokens = np.asarray(np.memmap(bin_path(prefix), dtype=self.dtype, mode="r"))

    def __len__(self) -> int:
        """Number of sequences; gpt-neox's tools write one for each document."""
        return len(self.sizes)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_index) - 1

    def warm_up(self) -> None:
        """Read both files once, so that they are in the page cache."""
        for path in (idx_path(self.prefix), bin_path(self.prefix)):
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 26):
                    pass

    def starts(self, sequences: np.ndarray) -> np.ndarray:
        """Where the given sequences start in `tokens`, int64 of the same shape."""
        return self._pointers[sequences] // self._unit

    def __getitem__(self, sequence: int) -> np.ndarray:
        """The ids of one sequence, a view into the file."""
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` ids (default: all) of one sequence from `offset` on, a view into the file."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"{self.prefix} has {len(self)} sequences; {sequence} was asked for")
        size = int(self.sizes[sequence])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"sequence {sequence} of {self.prefix} has {size} tokens, not {offset} + {length}")
        start = int(self._pointers[sequence]) // self._unit + offset
        return self.tokens[start : start + length]
