"""Groups of near-duplicate documents over several files, in bounded memory, resumable."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neox.corpus import Position
from neox.workers import ordered_map, worker_count
from tools.web_text.candidates import FindCandidates, write_firsts
from tools.web_text.chunks import read_chunks
from tools.web_text.clusters import CompareGroups, TextFile, UnionFind, link_candidates, mark_needed
from tools.web_text.document_index import LONGEST, DocumentIndex, IndexChunk
from tools.web_text.minhash import Bands
from tools.web_text.shards import with_shards, write_shard
from tools.web_text.step import Counts, Job, S

FEW_DOCUMENTS = 100_000  # fewer take less time than the start of processes
FEW_CANDIDATES = 5_000


@dataclass(frozen=True)
class Similarity:
    """What makes two documents near-duplicates.

    Attributes:
        bands: Division of the signatures; None finds equal texts only.
        threshold: Least similarity of two candidates.
        kind: Key of `SIMILARITIES`.
        seed: Of the signatures.
    """

    bands: Bands | None
    threshold: float
    kind: str
    seed: int


def index_shard(job: Job[S], index: DocumentIndex, similarity: Similarity) -> None:
    """Compute the part of an index that is the job's share of the chunks."""
    chunks = read_chunks(index.files, (0, Position()), index.max_line_bytes, lambda _: None)
    write_shard(job, IndexChunk(similarity.bands, similarity.seed), index.files, chunks)


@dataclass(frozen=True)
class Groups:
    """Groups of documents; a document is in one of them, perhaps alone.

    Attributes:
        index: The documents.
        firsts: First document with the same text as each document [documents].
        roots: First document of each document's group [documents].
        counts: Counts of the documents read, with figures of the search in `details`.
    """

    index: DocumentIndex
    firsts: NDArray[np.uint32]
    roots: NDArray[np.uint32]
    counts: Counts


def group_documents(job: Job[S], index: DocumentIndex, similarity: Similarity, memory_mb: int) -> Groups:
    """Group the documents of an index by near-duplicates: a chain of similar pairs is one group.

    What an interrupted call has completed in the index's directory is kept.

    Args:
        job: Settings of the processes, of which the groups do not depend, and of bad inputs.
        index: Files to read, and the directory for intermediate files.
        similarity: What makes two documents near-duplicates.
        memory_mb: Memory for sorting; each process needs about 1 GiB more where documents are as long as can be.

    Raises:
        DataError: If an input cannot be read, or too many are bad.
    """
    work, count = index.directory, similarity.bands.count if similarity.bands is not None else 0
    workers = job.settings.workers
    function, processes = with_shards(job, IndexChunk(similarity.bands, similarity.seed), index.files)
    counts = index.build(function, processes, job.settings.skip_bad)
    firsts, roots = work / "firsts", work / "roots"
    if not firsts.exists():
        write_firsts(index, firsts, memory_mb)
    several = workers if len(index) >= FEW_DOCUMENTS else 1
    find = FindCandidates(index, firsts, max(1, memory_mb // worker_count(several)))
    deque(ordered_map(find, range(count), several), maxlen=0)
    candidates = mark_needed(index, find, count, work / "needed")
    texts = TextFile(work)
    texts.write(index, work / "needed", several)
    forest = UnionFind(work / "roots.partial", firsts)
    compare = CompareGroups(index, texts, similarity.threshold, similarity.kind)
    unlike = link_candidates(forest, find, count, compare, workers if candidates >= FEW_CANDIDATES else 1)
    forest.flatten()
    (work / "roots.partial").rename(roots)
    counts.details = describe(similarity)
    long = sum(int(np.count_nonzero(piece > LONGEST)) for _, piece in index.pieces("characters"))
    counts.details |= {"candidates": candidates, "too_long_to_compare": long, "unlike_representatives": unlike}
    first, root = (np.asarray(np.memmap(path, np.uint32, "r"))[: len(index)] for path in (firsts, roots))
    return Groups(index, first, root, counts)


def describe(similarity: Similarity) -> dict[str, Any]:
    """Return the figures of a search, with its expected recall."""
    bands = similarity.bands
    if bands is None:
        return {"bands": 0}
    recall = {f"{s:.3g}": round(bands.recall(s), 4) for s in sorted({similarity.threshold, 0.7, 0.8, 0.9, 0.95})}
    return {"bands": bands.count, "rows": bands.rows, "expected_recall": recall}
