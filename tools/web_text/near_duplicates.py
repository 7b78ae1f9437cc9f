"""Search for groups of near-duplicate documents over several files, in bounded memory, resumable.

    files         DocumentIndex.build   (document_index.py) each document's digest, length and band hashes, as columns
        v
    firsts        write_firsts          the first document with the same text, for each: equal digests
        v
    candidates_N  FindCandidates        of band N: groups of documents that share its hash; one worker a band
        v
    texts         TextFile              the inputs are read again, and the texts of candidates kept
        v
    roots         link_candidates       candidates are compared by their 5-grams (`CompareGroups`); a pair that is
                                        similar joins two groups (`UnionFind`)

Each of these is a file in the work directory, so that an interrupted search continues after the last one. Columns have
an entry for each document. Keys are hashes, so ranges of equal width hold about equal numbers of documents: one range
after another is selected from its column and sorted in memory. The lower the limit of memory, the more often a column
is read.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from neox.files import atomic_write, fsync_path
from neox.log import progress
from neox.workers import ordered_map, worker_count
from tools.web_text.chunks import START, Chunk, read_chunks, with_shards, write_shard
from tools.web_text.document_index import LONGEST, DocumentIndex, IndexChunk, good_records
from tools.web_text.signatures import (
    OLD_BANDS,
    SIMILARITIES,
    Bands,
    bands_for,
    is_wide,
    narrow_set,
    shared,
    wide_set,
)
from tools.web_text.step import Counts, Job, Settings

FEW_DOCUMENTS = 100_000  # fewer take less time than the start of processes
FEW_CANDIDATES = 5_000
EXHAUSTIVE = 32  # all pairs of a group are compared up to this number of documents
REPRESENTATIVES = 16  # documents of a larger group with which its others are compared
_DOCUMENTS_AT_ONCE = 256
_CACHE_BYTES = 1 << 28
_BYTES_PER_DOCUMENT = 40  # key, number, order and their sorted copies
_ROWS = 1 << 20
_MIB = 1 << 20
Documents = NDArray[np.uint32]
"""Numbers of documents, from 0 over all inputs."""


class NearDuplicateSettings(Settings):
    """Settings of the search for near-duplicates."""

    threshold: float = Field(0.9, gt=0, le=1)
    """Least similarity of near-duplicates, measured between their sets of character 5-grams."""

    similarity: Literal["union", "min", "max"] = "union"
    """What the size of the intersection is divided by: the size of the union, or of the smaller or larger set. The
    setting does not change which candidates are found: `min` accepts more of them, `max` fewer."""

    old_defaults: bool = False
    """10 bands of 10 rows as in Megatron's recipe, for any threshold; the report shows the expected recall."""

    memory_mb: int = Field(4096, ge=16)
    """Memory for sorting hashes; the output does not depend on it."""

    RUNTIME: ClassVar[frozenset[str]] = Settings.RUNTIME | {"memory_mb"}

    @property
    def only_equal(self) -> bool:
        """Whether only equal texts are looked for."""
        return False

    def bands(self) -> Bands | None:
        """Return the division of the signatures; None if only equal texts are looked for.

        Raises:
            ConfigError: If the threshold is too low.
        """
        if self.only_equal:
            return None
        if self.old_defaults:
            return OLD_BANDS
        return bands_for(self.threshold)


N = TypeVar("N", bound=NearDuplicateSettings)


def make_index(job: Job[N], files: tuple[str, ...]) -> DocumentIndex:
    """Return the index, still empty, of the documents in some files."""
    return DocumentIndex(job.work, files, job.settings.bands(), job.settings.max_line_mb * _MIB)


def index_shard(job: Job[N], index: DocumentIndex) -> None:
    """Compute the part of an index that is the job's share of the chunks."""
    chunks = read_chunks(index.files, START, index.max_line_bytes, lambda _: None)
    write_shard(job, IndexChunk(index.bands, job.settings.seed), index.files, chunks)


@dataclass(frozen=True)
class Groups:
    """Groups of documents. Each document is in one group, which may hold no other.

    Attributes:
        index: The documents.
        firsts: Number of the first document with the same text, for each document [documents].
        roots: Number of the first document of its group, for each document [documents].
        counts: Counts of the documents read, with figures of the search in `details`.
    """

    index: DocumentIndex
    firsts: NDArray[np.uint32]
    roots: NDArray[np.uint32]
    counts: Counts


def group_documents(job: Job[N], index: DocumentIndex) -> Groups:
    """Group the documents of an index by near-duplicates: a chain of similar pairs is one group.

    The parts that an interrupted call has completed in the index's directory are kept.

    Args:
        job: The job. The groups do not depend on its workers and memory.
        index: Files to read, and the directory for intermediate files.

    Raises:
        DataError: If an input cannot be read, or too many are bad.
    """
    settings = job.settings
    work = index.directory
    bands = index.bands.count if index.bands is not None else 0
    function, processes = with_shards(job, IndexChunk(index.bands, settings.seed), index.files)
    counts = index.build(function, processes, settings.skip_bad)
    firsts = work / "firsts"
    roots = work / "roots"
    if not firsts.exists():
        write_firsts(index, firsts, settings.memory_mb)
    workers = settings.workers if len(index) >= FEW_DOCUMENTS else 1
    find = FindCandidates(index, firsts, max(1, settings.memory_mb // worker_count(workers)))
    for _ in ordered_map(find, range(bands), workers):
        pass  # each band is a file
    candidates = mark_needed(index, find, bands, work / "needed")
    texts = TextFile(work)
    texts.write(index, work / "needed", workers)
    forest = UnionFind(work / "roots.partial", firsts)
    compare = CompareGroups(index, texts, settings.threshold, settings.similarity)
    workers = settings.workers if candidates >= FEW_CANDIDATES else 1
    unlike = link_candidates(forest, find, bands, compare, workers)
    forest.flatten()
    (work / "roots.partial").rename(roots)
    counts.details = describe(index.bands, settings.threshold)
    counts.details["candidates"] = candidates
    too_long = 0
    for _, characters in index.pieces("characters"):
        too_long += int(np.count_nonzero(characters > LONGEST))
    counts.details["too_long_to_compare"] = too_long
    counts.details["unlike_representatives"] = unlike
    return Groups(index, _numbers(firsts, len(index)), _numbers(roots, len(index)), counts)


def _numbers(path: Path, count: int) -> NDArray[np.uint32]:
    """Return the first numbers of a file, memory-mapped."""
    return np.asarray(np.memmap(path, np.uint32, "r"))[:count]


def describe(bands: Bands | None, threshold: float) -> dict[str, Any]:
    """Return the figures of a search, with its expected recall at several similarities."""
    if bands is None:
        return {"bands": 0}
    similarities = sorted({threshold, 0.7, 0.8, 0.9, 0.95})
    recall = {f"{similarity:.3g}": round(bands.recall(similarity), 4) for similarity in similarities}
    return {"bands": bands.count, "rows": bands.rows, "expected_recall": recall}


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
        key = key[order]
        document = document[order]

        # Equal keys stand together now: groups of one are left out.
        begins = np.append(True, key[1:] != key[:-1])[: len(key)]
        sizes = np.diff(np.append(np.flatnonzero(begins), len(key)))
        yield document[np.repeat(sizes > 1, sizes)], sizes[sizes > 1]


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


class _NgramSets:
    """Sets of 5-grams of documents; those used last are kept in memory."""

    def __init__(self, index: DocumentIndex, texts: TextFile, file: BinaryIO) -> None:
        self._lengths = index.column("bytes")
        self._starts = np.memmap(texts.starts, np.uint64, "r")
        self._file = file
        self._cached: OrderedDict[tuple[int, bool], NDArray[Any]] = OrderedDict()
        self._cached_bytes = 0
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
        if key in self._cached:
            self._cached.move_to_end(key)
            return self._cached[key]
        text = self._read(document)
        found = wide_set(text) if wide else narrow_set(text)
        self._cached[key] = found
        self._cached_bytes += found.nbytes
        while self._cached_bytes > _CACHE_BYTES and len(self._cached) > 1:
            self._cached_bytes -= self._cached.popitem(last=False)[1].nbytes
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
            sets = _NgramSets(self.index, self.texts, file)
            for size in sizes.tolist():
                members = documents[start : start + size].tolist()
                known = roots[start : start + size].tolist()
                start += size
                if size <= EXHAUSTIVE:
                    # All pairs, except those that earlier pairs have already joined.
                    for i, a in enumerate(members):
                        for j in range(i + 1, len(members)):
                            if known[i] != known[j] and sets.similarity(a, members[j], self.kind) >= self.threshold:
                                links.append((a, members[j]))
                                joined = known[j]
                                known = [known[i] if root == joined else root for root in known]
                    continue
                # Each with representatives: the first documents that were like none before them.
                leaders: list[int] = []
                for member in members:
                    for leader in leaders:
                        if sets.similarity(leader, member, self.kind) >= self.threshold:
                            links.append((leader, member))
                            break
                    else:
                        if len(leaders) < REPRESENTATIVES:
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
