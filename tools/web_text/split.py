"""Step `split`: train, validation and test sets without near-duplicates across them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from pydantic import Field

from neox.corpus import BadInput, LineBlock
from neox.errors import ConfigError
from neox.log import progress
from tools.dataset.split import draw_parts, write_parts
from tools.web_text.document_index import DocumentIndex, records_of
from tools.web_text.lines import total_bytes
from tools.web_text.near_duplicates import (
    NearDuplicateSettings,
    group_documents,
    index_shard,
    make_index,
)
from tools.web_text.step import Job, Step

_MIB = 1 << 20


class SplitSettings(NearDuplicateSettings):
    """Divide documents at random into `OUTPUT`, `OUTPUT.valid` and `OUTPUT.test` (before `.jsonl` or `.jsonl.zst`).

    Near-duplicates go to one part. The part of each document, or of the first of its near-duplicates, is drawn
    independently, so the shares hold on average. Lines are copied unchanged. A `.tsv` next to each part holds, for each
    of its lines, the file it came from and its line there, from 1.
    """

    test_percent: float = Field(5, ge=0, lt=100)
    """Share of the test set."""

    dev_percent: float = Field(5, ge=0, lt=100)
    """Share of the validation set."""

    near_duplicates: bool = True
    """Whether near-duplicates are kept together; otherwise only equal texts are."""

    @property
    def only_equal(self) -> bool:
        """Whether only equal texts are looked for."""
        return not self.near_duplicates

    def parts(self) -> tuple[Path, ...]:
        """Return the files for train, validation and test."""
        stem, end, zst = self.output.name.rpartition(".jsonl")
        return self.output, *(self.output.with_name(f"{stem}.{part}{end}{zst}") for part in ("valid", "test"))


def split(job: Job[SplitSettings]) -> None:
    """Write the three parts of a job."""
    settings = job.settings
    train = 100 - settings.test_percent - settings.dev_percent
    if train <= 0:
        raise ConfigError("split: --test-percent and --dev-percent leave nothing to train on")
    index = make_index(job, job.files)
    if job.shard is not None:
        return index_shard(job, index)
    groups = group_documents(job, index)
    draws = draw_parts(f"{train},{settings.dev_percent},{settings.test_percent}", settings.seed)

    # The part of a document is that of the first of its group.
    count = len(groups.roots)
    part_of = np.memmap(job.work / "parts", np.int8, "w+", shape=max(count, 1))
    for start in range(0, count, _MIB):
        stop = min(start + _MIB, count)
        part_of[start:stop] = np.fromiter(islice(draws, stop - start), np.int8, stop - start)
        part_of[start:stop] = part_of[groups.roots[start:stop]]
    outputs = [(path, path.with_name(f"{path.name.rpartition('.jsonl')[0]}.tsv")) for path in settings.parts()]
    written = write_parts(_lines(index), map(int, part_of[:count]), outputs)
    job.counts = groups.counts
    job.counts.documents_out = job.counts.documents_in
    job.counts.bytes_out = job.counts.bytes_in
    job.counts.details |= written


def _lines(index: DocumentIndex) -> Iterator[tuple[str, int, bytes]]:
    """Yield the lines of all documents: file, number of the line, bytes; bad lines are left out."""
    with progress("split: writing", total_bytes(index.files), "B") as bar:
        for _, _, chunk in index.chunks(bar.update):
            if not isinstance(chunk.content, LineBlock):
                continue
            first = chunk.content.start.line
            lines = enumerate(chunk.content.data.split(b"\n"), start=first)
            filled = [(number, line) for number, line in lines if line and not line.isspace()]
            for (number, line), record in zip(filled, records_of(chunk), strict=True):
                if not isinstance(record, BadInput):
                    yield chunk.content.file, number, line


SPLIT = Step("split", SplitSettings, split, outputs=SplitSettings.parts, packages=("rensa", "numpy"), sharded=True)
