"""Search for groups of near-duplicate documents over several files, in bounded memory, resumable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from neox.workers import ordered_map, worker_count
from tools.web_text.candidates import FindCandidates, write_firsts
from tools.web_text.chunks import START, read_chunks
from tools.web_text.clusters import CompareGroups, TextFile, UnionFind, link_candidates, mark_needed
from tools.web_text.document_index import LONGEST, DocumentIndex, IndexChunk
from tools.web_text.minhash import OLD_BANDS, Bands, bands_for
from tools.web_text.shards import with_shards, write_shard
from tools.web_text.step import Counts, Job, Settings

FEW_DOCUMENTS = 100_000  # fewer take less time than the start of processes
FEW_CANDIDATES = 5_000
_MIB = 1 << 20


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
    counts.details["too_long_to_compare"] = _count_too_long(index)
    counts.details["unlike_representatives"] = unlike
    return Groups(index, _numbers(firsts, len(index)), _numbers(roots, len(index)), counts)


def _count_too_long(index: DocumentIndex) -> int:
    count = 0
    for _, characters in index.pieces("characters"):
        count += int(np.count_nonzero(characters > LONGEST))
    return count


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
