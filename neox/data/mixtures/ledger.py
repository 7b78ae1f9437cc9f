"""Ledger of the samples that a run has read from each dataset. Checkpoints contain it.

With the ledger, a batch is a function of the iteration and of what was read before the mixture last changed. So a run
that resumes with other weights, datasets or lengths reads no sample twice.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from neox.data.mixtures.stream import SamplesRead
from neox.data.samples.rows import TrainingDocuments

_VERSION = 1
SKIPPED_SAMPLES = "skipped_samples"
"""Key in a mixture after a loss spike: the number of samples between the checkpoint and the spike."""


class IndexMapArguments(NamedTuple):
    """Arguments of the index maps of a dataset that was first read in gpt-neox's order.

    Attributes:
        num_samples: Number of samples of the run that built the maps.
        seq_length: Number of tokens of a sample's input.
        seed: Seed of the shuffles.
    """

    num_samples: int
    seq_length: int
    seed: int


@dataclass(frozen=True)
class DatasetRecord:
    """Record of what was read from one dataset.

    Attributes:
        reads: Samples that were read one after another, with their lengths.
        gpt_neox: Order in which reading began; None for the order of `neox.data.mixtures.stream`.
    """

    reads: tuple[SamplesRead, ...] = ()
    gpt_neox: IndexMapArguments | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens read."""
        return sum(read.length * read.samples for read in self.reads)

    def with_read(self, length: int, samples: int) -> DatasetRecord:
        """Return the record after further samples."""
        reads = list(self.reads)
        if reads and reads[-1].length == length:
            samples += reads.pop().samples
        if samples:
            reads.append(SamplesRead(length, samples))
        return DatasetRecord(tuple(reads), self.gpt_neox)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> DatasetRecord:
        """Return the record that `to_json` has encoded."""
        gpt_neox = None
        if fields["gpt_neox"] is not None:
            gpt_neox = IndexMapArguments(*fields["gpt_neox"])
        return cls(tuple(SamplesRead(*read) for read in fields["reads"]), gpt_neox)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        return {
            "reads": list(map(list, self.reads)),
            "gpt_neox": None if self.gpt_neox is None else list(self.gpt_neox),
        }


Records = Mapping[str, DatasetRecord]


@dataclass(frozen=True)
class Ledger:
    """Record of what a run has read, and of what determines the order of its samples.

    Attributes:
        mixture: Everything that determines the order from `start` on, as JSON. A changed mixture begins a new order.
        start: Number of samples of the run before the order of this mixture begins.
        at_start: Record of each dataset before that.
        samples: Number of samples of the run so far.
        records: Record of each dataset so far.
        shares: Share of each dataset in each stage, from `start` on.
    """

    mixture: Mapping[str, Any]
    start: int
    at_start: Records
    samples: int
    records: Records
    shares: tuple[tuple[float, ...], ...] = field(default=())

    def before(self, key: str) -> DatasetRecord:
        """Return the record of a dataset before the order of this mixture begins."""
        return self.at_start.get(key, DatasetRecord())

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Ledger | None:
        """Return the ledger that `to_json` has encoded; None for an unknown version."""
        if fields.get("version") != _VERSION:
            return None
        return cls(
            mixture=fields["mixture"],
            start=fields["start"],
            at_start=_records_from_json(fields["at_start"]),
            samples=fields["samples"],
            records=_records_from_json(fields["records"]),
            shares=tuple(map(tuple, fields["shares"])),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as JSON."""
        return {
            "version": _VERSION,
            "mixture": self.mixture,
            "start": self.start,
            "at_start": _records_to_json(self.at_start),
            "samples": self.samples,
            "records": _records_to_json(self.records),
            "shares": list(map(list, self.shares)),
        }


def after_skipping(at_checkpoint: Mapping[str, Any], at_spike: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ledger of a run that continues from a checkpoint, but skips the samples read since then.

    Args:
        at_checkpoint: Ledger at the checkpoint's step, as JSON.
        at_spike: Ledger at the last step whose samples are skipped, as JSON.
    """
    skipped = at_spike["samples"] - at_checkpoint["samples"]
    mixture = {**at_spike["mixture"], SKIPPED_SAMPLES: skipped}  # a changed mixture restarts the order of samples
    return {**at_spike, "samples": at_checkpoint["samples"], "mixture": mixture}


def _records_to_json(records: Records) -> dict[str, Any]:
    return {key: record.to_json() for key, record in records.items()}


def _records_from_json(fields: Mapping[str, Any]) -> Records:
    return {key: DatasetRecord.from_json(record) for key, record in fields.items()}


def dataset_keys(parts: Sequence[TrainingDocuments]) -> list[str]:
    """Return a key for each dataset, which identifies it in a ledger wherever its files are.

    A key is a hash of the sizes of the documents, followed by a number that distinguishes repeated datasets.
    """
    keys: list[str] = []
    repeats: Counter[str] = Counter()
    for part in parts:
        used = part.documents
        digest = hashlib.sha256(f"{used}\n".encode())
        digest.update(np.ascontiguousarray(part.rows.indexed.sizes[used.start : used.stop], dtype=np.int64).data)
        key = digest.hexdigest()[:24]
        keys.append(f"{key}-{repeats[key]}")
        repeats[key] += 1
    return keys
