"""Documents with equal keys: exact duplicates by digest, candidates for near-duplicates by the hash of a band.

Keys are hashes, so ranges of equal width hold about equal numbers of documents. One range after another is selected
from its column and sorted in memory. The lower the limit of memory, the more often a column is read. All documents that
share a key are in one range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from neox.files import atomic_write
from tools.web_text.document_index import LONGEST, DocumentIndex

_BYTES_PER_DOCUMENT = 40  # key, number, order and their sorted copies
_MIB = 1 << 20
Documents = NDArray[np.uint32]


def equal_keys(
    index: DocumentIndex, column: str, usable: NDArray[np.bool_] | None, memory_mb: int
) -> Iterator[tuple[Documents, NDArray[np.int64]]]:
    """Yield groups of at least two documents with equal keys, in order of the keys.

    Args:
        index: The documents.
        column: Column of the keys.
        usable: Which documents to take [documents]; None takes all.
        memory_mb: Memory for keys.

    Yields:
        Documents of several groups, ascending inside a group, and the number of documents of each group.
    """
    ranges = max(1, -(-len(index) * _BYTES_PER_DOCUMENT // (memory_mb * _MIB)))
    for number in range(ranges):
        low = np.uint64(number * 2**64 // ranges)
        high = np.uint64((number + 1) * 2**64 // ranges - 1)
        keys = [np.empty(0, np.uint64)]
        documents = [np.empty(0, np.uint32)]
        for start, values in index.pieces(column):
            chosen = (values >= low) & (values <= high)
            if usable is not None:
                chosen &= usable[start : start + len(values)]
            keys.append(values[chosen])
            documents.append((np.flatnonzero(chosen) + start).astype(np.uint32))
        key = np.concatenate(keys)
        document = np.concatenate(documents)
        del keys, documents  # their memory is needed for sorting
        order = np.argsort(key, kind="stable")
        yield _groups_of_two(key[order], document[order])


def _groups_of_two(keys: NDArray[np.uint64], documents: Documents) -> tuple[Documents, NDArray[np.int64]]:
    """Return the groups of at least two equal keys among sorted ones."""
    if not len(keys):
        return documents, np.empty(0, np.int64)
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    sizes = np.diff(np.append(starts, len(keys)))
    return documents[np.repeat(sizes > 1, sizes)], sizes[sizes > 1]


def write_firsts(index: DocumentIndex, path: Path, memory_mb: int) -> None:
    """Write for each document the number of the first document with the same text [documents].

    Texts with equal 128-bit digests are equal.

    Args:
        index: The documents.
        path: File to write.
        memory_mb: Memory for keys.
    """
    path.unlink(missing_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    firsts = np.memmap(partial, np.uint32, "w+", shape=max(len(index), 1))
    for start in range(0, len(index), _MIB):
        stop = min(start + _MIB, len(index))
        firsts[start:stop] = np.arange(start, stop, dtype=np.uint32)
    rest = index.column("digest_1")
    for documents, sizes in equal_keys(index, "digest_0", None, memory_mb):
        # The groups share the first half of the digest: divide them by the second half.
        second = rest[documents]
        group = np.repeat(np.arange(len(sizes)), sizes)
        order = np.lexsort((documents, second, group))
        documents = documents[order]
        second = second[order]
        group = group[order]
        differs = (group[1:] != group[:-1]) | (second[1:] != second[:-1])
        begins = np.append(True, differs)[: len(documents)]
        leaders = documents[begins]
        firsts[documents] = leaders[np.cumsum(begins) - 1]
    firsts.flush()
    partial.rename(path)


@dataclass(frozen=True)
class FindCandidates:
    """Function of a band, for worker processes: writes the groups of documents that share the band's hash.

    Attributes:
        index: The documents.
        firsts: File of `write_firsts`. A document that repeats an earlier text is no candidate.
        memory_mb: Memory of one worker.
    """

    index: DocumentIndex
    firsts: Path
    memory_mb: int

    def path(self, band: int) -> Path:
        """Return the file of a band's groups. A group is the number of its documents and then they, all uint32."""
        return self.index.directory / f"candidates_{band:03}"

    def __call__(self, band: int) -> None:
        """Write the groups of a band, unless an earlier run did."""
        if self.path(band).exists():
            return
        firsts = np.memmap(self.firsts, np.uint32, "r")
        usable = np.empty(len(self.index), dtype=np.bool_)
        for start, characters in self.index.pieces("characters"):
            stop = start + len(characters)
            usable[start:stop] = firsts[start:stop] == np.arange(start, stop, dtype=np.uint32)
            usable[start:stop] &= characters <= LONGEST
        with atomic_write(self.path(band)) as file:
            for documents, sizes in equal_keys(self.index, f"band_{band:03}", usable, self.memory_mb):
                starts = np.cumsum(sizes) - sizes
                file.write(np.insert(documents, starts, sizes.astype(np.uint32)).tobytes())


def read_groups(path: Path, most: int) -> Iterator[tuple[Documents, NDArray[np.int64]]]:
    """Yield the groups of a file of candidates, several at a time.

    Args:
        path: File of `FindCandidates`.
        most: Most documents at a time; a larger group comes by itself.

    Yields:
        Documents of several groups, and the number of documents of each group.
    """
    if not path.stat().st_size:
        return
    values = np.asarray(np.memmap(path, np.uint32, "r"))
    position = 0
    while position < len(values):
        documents: list[Documents] = []
        sizes: list[int] = []
        taken = 0
        while position < len(values) and (not taken or taken + int(values[position]) <= most):
            size = int(values[position])
            documents.append(np.array(values[position + 1 : position + 1 + size]))
            sizes.append(size)
            taken += size
            position += 1 + size
        yield np.concatenate(documents), np.array(sizes)
