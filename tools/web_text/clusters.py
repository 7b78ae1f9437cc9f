"""Clusters of near-duplicates: exact similarity of candidates, and a union-find structure on disk."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from neox.files import fsync_path
from neox.log import progress
from neox.workers import ordered_map
from tools.web_text.candidates import Documents, FindCandidates, read_groups
from tools.web_text.chunks import Chunk
from tools.web_text.document_index import DocumentIndex, good_records
from tools.web_text.shingles import SIMILARITIES, is_wide, narrow_set, shared, wide_set

EXHAUSTIVE = 32  # all pairs of a group are compared up to this number of documents
REPRESENTATIVES = 16  # documents of a larger group with which its others are compared
_DOCUMENTS_AT_ONCE = 256
_CACHE_BYTES = 1 << 28
_ROWS = 1 << 20


@dataclass(frozen=True)
class TextFile:
    """Texts of the candidates, one after another, and where each begins."""

    directory: Path

    @property
    def texts(self) -> Path:
        """File of the texts."""
        return self.directory / "texts"

    @property
    def starts(self) -> Path:
        """File with the offset of each document's text in bytes [documents]."""
        return self.directory / "text_starts"

    def write(self, index: DocumentIndex, needed: Path, workers: int) -> None:
        """Read the inputs again, and write the texts of the documents that are needed, unless they are complete."""
        complete = self.directory / "texts.complete"
        if complete.exists():
            return
        starts = np.memmap(self.starts, np.uint64, "w+", shape=max(len(index), 1))
        mask = np.asarray(np.memmap(needed, np.bool_, "r"))
        lengths = index.column("bytes")
        offset = 0
        with open(self.texts, "wb") as file, progress("texts of candidates", len(index), "documents") as bar:
            work = SelectTexts(needed)
            with closing(ordered_map(work, index.chunks(), workers)) as results:
                for (start, end, _), data in results:
                    sizes = np.where(mask[start:end], lengths[start:end], 0).astype(np.uint64)
                    starts[start:end] = offset + np.cumsum(sizes) - sizes
                    file.write(data)
                    offset += len(data)
                    bar.update(end - start)
        starts.flush()
        fsync_path(self.texts)
        complete.touch()


@dataclass(frozen=True)
class SelectTexts:
    """Function of a chunk, for worker processes: joins the texts of the documents that are needed."""

    needed: Path

    def __call__(self, numbered: tuple[int, int, Chunk]) -> bytes:
        """Return the texts.

        Args:
            numbered: Number of the chunk's first document, number after its last, and the chunk.
        """
        start, end, chunk = numbered
        if start == end:
            return b""
        wanted = np.memmap(self.needed, np.bool_, "r", shape=end)[start:].tolist()
        if not any(wanted):
            return b""
        texts = []
        for record, is_wanted in zip(good_records(chunk), wanted, strict=True):
            if is_wanted:
                texts.append(record["text"].encode())
        return b"".join(texts)


class _Sets:
    """Sets of 5-grams of documents; those used last are kept in memory."""

    def __init__(self, index: DocumentIndex, texts: TextFile, file: BinaryIO) -> None:
        self._lengths = index.column("bytes")
        self._starts = np.memmap(texts.starts, np.uint64, "r")
        self._file = file
        self._held: OrderedDict[tuple[int, bool], NDArray[Any]] = OrderedDict()
        self._bytes = 0
        self._wide: dict[int, bool] = {}

    def similarity(self, a: int, b: int, kind: str) -> float:
        """Return the exact similarity of two documents."""
        wide = self._is_wide(a) or self._is_wide(b)
        first = self._set(a, wide=wide)
        second = self._set(b, wide=wide)
        return SIMILARITIES[kind](shared(first, second), len(first), len(second))

    def _is_wide(self, document: int) -> bool:
        """Return whether a document's 5-grams need 20 bytes each."""
        if document not in self._wide:
            self._wide[document] = is_wide(self._read(document))
        return self._wide[document]

    def _set(self, document: int, *, wide: bool) -> NDArray[Any]:
        """Return the sorted distinct 5-grams of a document."""
        key = (document, wide)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        text = self._read(document)
        found = wide_set(text) if wide else narrow_set(text)
        self._held[key] = found
        self._bytes += found.nbytes
        while self._bytes > _CACHE_BYTES and len(self._held) > 1:
            self._bytes -= self._held.popitem(last=False)[1].nbytes
        return found

    def _read(self, document: int) -> str:
        length = int(self._lengths[document])
        start = int(self._starts[document])
        return os.pread(self._file.fileno(), length, start).decode()


@dataclass(frozen=True)
class CompareGroups:
    """Function of groups of candidates, for worker processes: finds the pairs that are similar.

    Attributes:
        index: The documents.
        texts: Texts of the documents.
        threshold: Least similarity.
        kind: Key of `SIMILARITIES`.
    """

    index: DocumentIndex
    texts: TextFile
    threshold: float
    kind: str

    def __call__(self, groups: tuple[Documents, NDArray[np.int64], Documents]) -> tuple[list[tuple[int, int]], int]:
        """Compare the documents of each group.

        Args:
            groups: Documents, sizes of the groups, and the root of each document so far. Documents with equal roots are
                not compared.

        Returns:
            Pairs that are similar, and the number of documents in large groups that are like no representative.
        """
        documents, sizes, roots = groups
        links: list[tuple[int, int]] = []
        unlike = 0
        start = 0
        with open(self.texts.texts, "rb") as file:
            sets = _Sets(self.index, self.texts, file)
            for size in sizes.tolist():
                members = documents[start : start + size].tolist()
                known = roots[start : start + size].tolist()
                start += size
                if size <= EXHAUSTIVE:
                    links += self._all_pairs(members, known, sets)
                else:
                    found, left = self._representatives(members, sets)
                    links += found
                    unlike += left
        return links, unlike

    def _similar(self, a: int, b: int, sets: _Sets) -> bool:
        return sets.similarity(a, b, self.kind) >= self.threshold

    def _all_pairs(self, members: list[int], roots: list[int], sets: _Sets) -> Iterator[tuple[int, int]]:
        """Yield the pairs that are similar, without those that earlier pairs have already joined."""
        for i, a in enumerate(members):
            for j in range(i + 1, len(members)):
                if roots[i] != roots[j] and self._similar(a, members[j], sets):
                    yield a, members[j]
                    joined = roots[j]
                    roots[:] = [roots[i] if root == joined else root for root in roots]

    def _representatives(self, members: list[int], sets: _Sets) -> tuple[list[tuple[int, int]], int]:
        """Compare each document with representatives: the first documents that were like none before them."""
        leaders: list[int] = []
        links: list[tuple[int, int]] = []
        unlike = 0
        for member in members:
            like = next((leader for leader in leaders if self._similar(leader, member, sets)), None)
            if like is not None:
                links.append((like, member))
            elif len(leaders) < REPRESENTATIVES:
                leaders.append(member)
            else:
                unlike += 1
        return links, unlike


class UnionFind:
    """Clusters of documents: the parent of each document, in a file. The root of a cluster is its first document."""

    def __init__(self, path: Path, firsts: Path) -> None:
        """Start with the clusters of equal texts.

        Args:
            path: File of the parents.
            firsts: File of `write_firsts`.
        """
        source = np.memmap(firsts, np.uint32, "r")
        self._file = np.memmap(path, np.uint32, "w+", shape=source.shape)
        for start in range(0, len(source), _ROWS):
            self._file[start : start + _ROWS] = source[start : start + _ROWS]
        self._parents = np.asarray(self._file)

    def root(self, document: int) -> int:
        """Return the first document of a document's cluster."""
        parents = self._parents
        while (parent := int(parents[document])) != document:
            grandparent = parents[parent]
            parents[document] = grandparent
            document = int(grandparent)
        return document

    def join(self, a: int, b: int) -> None:
        """Join the clusters of two documents."""
        first, second = sorted((self.root(a), self.root(b)))
        self._parents[second] = first

    def roots(self, documents: Documents) -> Documents:
        """Return the roots of several documents."""
        found: Documents = self._parents[documents]
        while np.any((above := self._parents[found]) != found):
            found = above
        return found

    def flatten(self) -> None:
        """Make every parent a root, and write the file."""
        for start in range(0, len(self._parents), _ROWS):
            self._parents[start : start + _ROWS] = self.roots(self._parents[start : start + _ROWS])
        self._file.flush()


def mark_needed(index: DocumentIndex, find: FindCandidates, bands: int, path: Path) -> int:
    """Write which documents are candidates [documents]; return their number."""
    needed = np.zeros(max(len(index), 1), dtype=np.bool_)
    for band in range(bands):
        for documents, _ in read_groups(find.path(band), _ROWS):
            needed[documents] = True
    path.write_bytes(needed.tobytes())
    return int(np.count_nonzero(needed))


def link_candidates(forest: UnionFind, find: FindCandidates, bands: int, compare: CompareGroups, workers: int) -> int:
    """Join the clusters of all candidates that are similar.

    The clusters are the connected parts of the graph of similar candidates. They do not depend on the order of
    comparisons.

    Returns:
        Number of times a document of a large group was like none of its representatives.
    """
    unlike = 0
    with progress("bands compared", bands, "bands") as bar:

        def groups() -> Iterator[tuple[Documents, NDArray[np.int64], Documents]]:
            for band in range(bands):
                for documents, sizes in read_groups(find.path(band), _DOCUMENTS_AT_ONCE):
                    roots = forest.roots(documents)
                    starts = np.cumsum(sizes) - sizes
                    apart = np.minimum.reduceat(roots, starts) != np.maximum.reduceat(roots, starts)
                    if apart.any():
                        chosen = np.repeat(apart, sizes)
                        yield documents[chosen], sizes[apart], roots[chosen]
                bar.update(1)

        with closing(ordered_map(compare, groups(), workers)) as results:
            for _, (links, left) in results:
                unlike += left
                for a, b in links:
                    forest.join(a, b)
    return unlike
