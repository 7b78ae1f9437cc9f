"""Step `dedup`: one document of each group of equal or nearly equal ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from neox.corpus import expand_inputs
from neox.files import atomic_write, sha256_of
from neox.log import progress
from neox.workers import ordered_map
from tools.web_text.chunks import Chunk
from tools.web_text.document_index import DocumentIndex, records_of
from tools.web_text.documents import ChunkOutput, ChunkResult
from tools.web_text.lines import empty_file, encode_line, text_bytes
from tools.web_text.minhash import OLD_BANDS, Bands, bands_for
from tools.web_text.near_duplicates import Groups, Similarity, group_documents, index_shard
from tools.web_text.step import Job, Settings, Step

_ROWS = 1 << 20
_MIB = 1 << 20
_Part = tuple[Chunk, range, list[int], list[int]]


class NearDuplicateSettings(Settings):
    """Settings of the search for near-duplicates."""

    threshold: float = Field(0.9, gt=0, le=1)
    """Least similarity of near-duplicates: of the sets of character 5-grams."""

    similarity: Literal["union", "min", "max"] = "union"
    """What the size of the intersection is divided by: the size of the union, or of the smaller or larger set.
    Candidates are found by `union` in any case: `min` accepts more of them, `max` fewer, and neither finds others."""

    old_defaults: bool = False
    """10 bands of 10 rows as in Megatron's recipe, for any threshold; the report shows the expected recall."""

    memory_mb: int = Field(4096, ge=16)
    """Memory for sorting hashes; the output does not depend on it."""

    RUNTIME: ClassVar[frozenset[str]] = Settings.RUNTIME | {"memory_mb"}

    def bands(self) -> Bands:
        """Return the division of the signatures. Raises ConfigError if the threshold is too low."""
        return OLD_BANDS if self.old_defaults else bands_for(self.threshold)


class DedupSettings(NearDuplicateSettings):
    """Keep one document of each group of duplicates and near-duplicates, over all inputs.

    Near-duplicates are found by MinHash signatures, and confirmed by their exact similarity.
    """

    keep: Literal["first", "longest"] = "first"
    """Which document of a group is kept: the first, in the order of the inputs, or the longest."""

    exact: bool = False
    """Whether only documents with equal texts are duplicates."""

    against: tuple[Path, ...] = ()
    """Files or directories of documents that are kept elsewhere: what is like one of them is dropped."""

    ONLY_WITH: ClassVar[Mapping[str, tuple[str, Any]]] = dict.fromkeys(
        ("threshold", "similarity", "old_defaults"), ("exact", False)
    )

    def fingerprint(self) -> Mapping[str, Any]:
        """Return the settings that determine the output's bytes, with the contents of the other files."""
        return {**super().fingerprint(), "against": [sha256_of(Path(file)) for file in expand_inputs(self.against)]}


def dedup(job: Job[DedupSettings]) -> None:
    """Write one document of each group."""
    settings = job.settings
    similarity = Similarity(
        None if settings.exact else settings.bands(), settings.threshold, settings.similarity, settings.seed
    )
    against = expand_inputs(settings.against)
    index = DocumentIndex(job.work, (*against, *job.files), similarity.bands, settings.max_line_mb * _MIB)
    if job.shard is not None:
        return index_shard(job, index, similarity)
    groups = group_documents(job, index, similarity, settings.memory_mb)
    others = index.documents_of(len(against))
    kept = choose(groups, settings.keep, others, job.work)
    job.counts = groups.counts
    job.counts.documents_in -= others
    job.counts.bytes_in -= int(index.column("bytes")[:others].sum(dtype=np.int64))
    job.counts.details |= {"groups": _count_groups(groups), "documents_of_other_files": others}
    _write(job, groups, kept, others)


def choose(groups: Groups, keep: str, others: int, work: Path) -> NDArray[np.uint32]:
    """Return which document of each document's group is kept, or one of other files that stands for it [documents].

    Args:
        groups: Groups of documents.
        keep: `first` or `longest`.
        others: Number of documents of other files, which come first.
        work: Directory for intermediate files.
    """
    if keep == "first":
        return groups.roots
    count = max(len(groups.roots), 1)
    longest = np.memmap(work / "longest", np.uint32, "w+", shape=count)
    chosen = np.memmap(work / "chosen", np.uint32, "w+", shape=count)
    chosen[:] = count - 1
    for start, characters in groups.index.pieces("characters"):
        np.maximum.at(longest, groups.roots[start : start + len(characters)], characters)
    for start, characters in groups.index.pieces("characters"):
        roots = groups.roots[start : start + len(characters)]
        numbers = np.arange(start, start + len(characters), dtype=np.uint32)
        best = (characters == longest[roots]) & (roots >= others)
        np.minimum.at(chosen, roots[best], numbers[best])
        np.minimum.at(chosen, roots[roots < others], roots[roots < others])
    for start in range(0, len(groups.roots), _ROWS):  # the file `longest` is no longer needed
        longest[start : start + _ROWS] = chosen[groups.roots[start : start + _ROWS]]
    return np.asarray(longest)


def _count_groups(groups: Groups) -> dict[str, int]:
    """Count the groups of at least two documents, and the documents of the largest."""
    sizes = np.bincount(groups.roots) if len(groups.roots) else np.zeros(1, np.int64)
    return {"of_several_documents": int(np.count_nonzero(sizes > 1)), "documents_of_the_largest": int(sizes.max())}


@dataclass(frozen=True)
class WriteChunk:
    """Function of a chunk, for worker processes: keeps documents, and drops the others without their text."""

    output: Path

    def __call__(self, part: _Part) -> ChunkResult:
        """Return the output of a chunk.

        Args:
            part: Chunk, and for each of its documents: its number, the number of the document that is kept for it, and
                the number of the first document with the same text.
        """
        chunk, numbers, chosen, firsts = part
        records = (record for record in records_of(chunk) if isinstance(record, dict))
        output = ChunkOutput(self.output)
        for record, number, choice, first in zip(records, numbers, chosen, firsts, strict=True):
            size = text_bytes(record)
            if number == choice:
                output.keep(encode_line(record), size)
                continue
            reason = "exact duplicate" if first != number else "near duplicate"
            rest = {key: value for key, value in record.items() if key != "text"}
            output.drop({**rest, "dropped": reason, "document": number, "kept": choice}, reason, size)
        return output.result()


def _write(job: Job[DedupSettings], groups: Groups, kept: NDArray[np.uint32], others: int) -> None:
    output, index = job.settings.output, groups.index

    def parts() -> Iterator[_Part]:
        with progress(f"{job.name}: writing", sum(map(os.path.getsize, index.files)), "B") as bar:
            for start, end, chunk in index.chunks(bar.update):
                if start >= others and end > start:
                    rows = slice(start, end)
                    yield chunk, range(start, end), kept[rows].tolist(), groups.firsts[rows].tolist()

    with atomic_write(output) as file, atomic_write(job.dropped) as dropped:
        with closing(ordered_map(WriteChunk(output), parts(), job.settings.workers)) as results:
            for _, written in results:
                file.write(written.kept)
                dropped.write(written.dropped)
                job.counts.add(written.counts)
        for target, counted in ((file, job.counts.documents_out), (dropped, len(job.counts.dropped))):
            if not counted:
                target.write(empty_file(output))


DEDUP = Step("dedup", DedupSettings, dedup, packages=("rensa", "numpy"), sharded=True)
