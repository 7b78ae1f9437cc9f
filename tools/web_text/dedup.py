"""Step `dedup`: one document of each group of equal or nearly equal ones.

    inputs   -> make_index, group_documents    near_duplicates.py: the first document of each document's group
             -> choose                         which document of a group is kept: the first, or the longest
    inputs   -> WriteChunk                     read again: kept, or dropped as an exact or a near duplicate

The search keeps what it has completed in the work directory, so that an interrupted step continues there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from neox.corpus import expand_inputs
from neox.files import atomic_write, sha256_of
from neox.log import progress
from neox.workers import ordered_map
from tools.web_text.chunks import Chunk
from tools.web_text.document_index import good_records
from tools.web_text.documents import ChunkOutput, ChunkResult
from tools.web_text.lines import empty_file, encode_line, text_bytes, total_bytes
from tools.web_text.near_duplicates import (
    Groups,
    NearDuplicateSettings,
    group_documents,
    index_shard,
    make_index,
)
from tools.web_text.step import Job, Step, without

_ROWS = 1 << 20
_NumberedChunk = tuple[Chunk, range, list[int], list[int]]


class DedupSettings(NearDuplicateSettings):
    """Keep one document of each group of duplicates and near-duplicates, over all inputs.

    Near-duplicates are found by MinHash signatures, and confirmed by their exact similarity.
    """

    keep: Literal["first", "longest"] = "first"
    """Which document of a group is kept: the first in the order of the inputs, or the longest."""

    exact: bool = False
    """Whether only documents with equal texts are duplicates."""

    against: tuple[Path, ...] = ()
    """Files or directories of documents that are kept elsewhere; a document that is like one of them is dropped."""

    ONLY_WITH: ClassVar[Mapping[str, tuple[str, Any]]] = dict.fromkeys(
        ("threshold", "similarity", "old_defaults"), ("exact", False)
    )

    @property
    def only_equal(self) -> bool:
        """Whether only equal texts are looked for."""
        return self.exact

    def fingerprint(self) -> Mapping[str, Any]:
        """Return the settings that determine the output's bytes, with the contents of the other files."""
        return {**super().fingerprint(), "against": [sha256_of(Path(file)) for file in expand_inputs(self.against)]}


def dedup(job: Job[DedupSettings]) -> None:
    """Write one document of each group."""
    settings = job.settings
    against = expand_inputs(settings.against)
    index = make_index(job, (*against, *job.files))
    if job.shard is not None:
        return index_shard(job, index)
    groups = group_documents(job, index)
    others = index.documents_of(len(against))
    kept = choose(groups, settings.keep, others, job.work)
    job.counts = groups.counts
    job.counts.documents_in -= others
    job.counts.bytes_in -= int(index.column("bytes")[:others].sum(dtype=np.int64))
    sizes = np.bincount(groups.roots, minlength=1)
    figures = {"of_several_documents": int(np.count_nonzero(sizes > 1)), "documents_of_the_largest": int(sizes.max())}
    job.counts.details |= {"groups": figures, "documents_of_other_files": others}

    # The inputs are read again, and each document is kept or dropped. Those of other files are not written.
    output = settings.output

    def chunks() -> Iterator[_NumberedChunk]:
        with progress(f"{job.name}: writing", total_bytes(index.files), "B") as bar:
            for start, end, chunk in index.chunks(bar.update):
                if start >= others and end > start:
                    rows = slice(start, end)
                    yield chunk, range(start, end), kept[rows].tolist(), groups.firsts[rows].tolist()

    with atomic_write(output) as file, atomic_write(job.dropped) as dropped:
        with closing(ordered_map(WriteChunk(output), chunks(), settings.workers)) as results:
            for _, written in results:
                file.write(written.kept)
                dropped.write(written.dropped)
                job.counts.add(written.counts)
        if not job.counts.documents_out:
            file.write(empty_file(output))
        if not job.counts.dropped:
            dropped.write(empty_file(output))


def choose(groups: Groups, keep: str, others: int, work: Path) -> NDArray[np.uint32]:
    """Return for each document which document of its group is kept [documents].

    A document of other files, which is in no output, may be the one that is kept.

    Args:
        groups: Groups of documents.
        keep: `first` or `longest`.
        others: Number of documents in other files; they are numbered first.
        work: Directory for intermediate files.
    """
    if keep == "first":
        return groups.roots
    count = max(len(groups.roots), 1)
    # for the root of each group: length of its longest document, then the number of the document that is kept
    longest = np.memmap(work / "longest", np.uint32, "w+", shape=count)
    chosen = np.memmap(work / "chosen", np.uint32, "w+", shape=count)
    chosen[:] = count - 1
    for start, characters in groups.index.pieces("characters"):
        roots = groups.roots[start : start + len(characters)]
        np.maximum.at(longest, roots, characters)
    for start, characters in groups.index.pieces("characters"):
        roots = groups.roots[start : start + len(characters)]
        numbers = np.arange(start, start + len(characters), dtype=np.uint32)
        best = (characters == longest[roots]) & (roots >= others)
        np.minimum.at(chosen, roots[best], numbers[best])
        elsewhere = roots[roots < others]
        np.minimum.at(chosen, elsewhere, elsewhere)
    # The lengths are no longer needed: their file gets the result.
    for start in range(0, len(groups.roots), _ROWS):
        longest[start : start + _ROWS] = chosen[groups.roots[start : start + _ROWS]]
    return np.asarray(longest)


@dataclass(frozen=True)
class WriteChunk:
    """Function of a chunk, for worker processes: keeps documents, and drops the others without their text."""

    output: Path

    def __call__(self, numbered: _NumberedChunk) -> ChunkResult:
        """Return the output of a chunk.

        Args:
            numbered: Chunk, and for each of its documents: its number, the number of the document that is kept for it,
                and the number of the first document with the same text.
        """
        chunk, numbers, chosen, firsts = numbered
        output = ChunkOutput(self.output)
        for record, number, choice, first in zip(good_records(chunk), numbers, chosen, firsts, strict=True):
            size = text_bytes(record)
            if number == choice:
                output.keep(encode_line(record), size)
                continue
            reason = "exact duplicate" if first != number else "near duplicate"
            output.drop(
                {**without(record, "text"), "dropped": reason, "document": number, "kept": choice}, reason, size
            )
        return output.result()


DEDUP = Step("dedup", DedupSettings, dedup, packages=("rensa", "numpy"), sharded=True)
