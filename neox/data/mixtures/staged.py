"""Samples of a run whose mixture of datasets changes.

    samples of the run   0 ....... first ............. first ............................. num_samples
    segments             (before)  |--- segment 0 -----|------------- segment 1 -----------|
    shares, length                 | 0.7 0.3, 2048     | 0.2 0.8, 4096                     |
    _records                       0                   1                                   2

Record 0 is what was read of each dataset before the first segment, and record n what was read after n segments.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neox.data.mixtures.blend import blend_indices
from neox.data.mixtures.ledger import DatasetRecord
from neox.data.mixtures.stream import DatasetStream, StreamCursor
from neox.data.samples.map_cache import load_or_build
from neox.data.samples.rows import RowLayout


class MixtureSegment(NamedTuple):
    """Successive samples of a run that have one mixture and one length.

    Attributes:
        first: Number of the first sample in the run.
        samples: Number of samples.
        seq_length: Number of tokens of a sample's input.
        shares: Share of each dataset.
    """

    first: int
    samples: int
    seq_length: int
    shares: tuple[float, ...]


class _SegmentOrder(NamedTuple):
    """Order of the samples of a segment.

    Attributes:
        datasets: Dataset of each sample, uint8 [samples].
        numbers: Number of each sample among those of its dataset in the segment, int64 [samples].
        cursors: Samples of each dataset of the segment, which follow those read before it.
    """

    datasets: np.ndarray
    numbers: np.ndarray
    cursors: Mapping[int, StreamCursor]


class StagedDataset:
    """Samples of several datasets, in shares and lengths that change from segment to segment.

    Within a segment the datasets take turns as in a `BlendedDataset`. Each dataset continues where the segment before
    has stopped. A batch must lie within a segment.

    Attributes:
        streams: Samples of each dataset.
        segments: Segments of the run, from the first sample that is read on.
        seq_length: Number of tokens of the longest sample.
        num_samples: Number of samples of the whole run.
    """

    def __init__(
        self,
        streams: Sequence[DatasetStream],
        segments: Sequence[MixtureSegment],
        records: Sequence[DatasetRecord],
        cache_dir: str | Path | None = None,
    ) -> None:
        """Build or load the orders.

        Args:
            streams: Samples of each dataset.
            segments: Segments of the run.
            records: What was read of each dataset before the first segment.
            cache_dir: Directory that keeps the orders between runs; None builds them in memory.

        Raises:
            DataError: If a dataset has no sample of a length.
        """
        self.streams = tuple(streams)
        self.segments = tuple(segments)
        self.seq_length = max(segment.seq_length for segment in segments)
        self.num_samples = segments[-1].first + segments[-1].samples
        self._records = [tuple(records)]  # before each segment, and after the last one
        self._orders: list[_SegmentOrder] = []
        for segment in segments:
            self._orders.append(self._build_order(segment, cache_dir))
            self._records.append(self._records_within(len(self._orders) - 1, segment.samples))

    def _build_order(self, segment: MixtureSegment, cache_dir: str | Path | None) -> _SegmentOrder:
        """Build or load the order of the segment that follows the last record."""
        used = [number for number, share in enumerate(segment.shares) if share > 0]
        shares = np.array([segment.shares[number] for number in used])

        def build() -> dict[str, np.ndarray]:
            chosen, numbers = blend_indices(shares, segment.samples)
            return {"datasets": np.array(used, dtype=np.uint8)[chosen], "numbers": numbers}

        key = hashlib.sha256(f"neox stage 1 {used} {shares.tolist()} {segment.samples}".encode()).hexdigest()[:32]
        arrays = load_or_build(cache_dir, key, ("datasets", "numbers"), build)
        cursors = {}
        for number in used:
            reads = self._records[-1][number].reads
            cursors[number] = self.streams[number].after(reads, segment.seq_length)
        return _SegmentOrder(arrays["datasets"], arrays["numbers"], cursors)

    def _records_within(self, number: int, samples: int) -> tuple[DatasetRecord, ...]:
        """Return what is read of each dataset after the first samples of a segment."""
        counts = np.bincount(self._orders[number].datasets[:samples], minlength=len(self.streams))
        length = self.segments[number].seq_length
        before = self._records[number]
        return tuple(record.with_read(length, count) for record, count in zip(before, counts.tolist(), strict=True))

    def records_at(self, samples: int) -> tuple[DatasetRecord, ...]:
        """Return what is read of each dataset after the first `samples` samples of the run."""
        number = self._number_of_segment(samples)
        return self._records_within(number, samples - self.segments[number].first)

    def _number_of_segment(self, sample: int) -> int:
        """Return the number of the segment of a sample."""
        return max(0, bisect_right(self.segments, sample, key=lambda segment: segment.first) - 1)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the rows of `read`, which can hold the ids of every dataset."""
        return np.result_type(*(stream.rows.dtype for stream in self.streams))

    @property
    def has_labels(self) -> bool:
        """Whether some tokens are not predicted, so that the labels differ from the tokens."""
        return any(stream.rows.labels is not None for stream in self.streams)

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return samples of one segment [len(indices), length + 1]."""
        groups, length = self._groups(np.asarray(indices))
        rows = np.empty((len(indices), length + 1), dtype=self.dtype)
        for chosen, cursor, numbers in groups:
            rows[chosen] = cursor.read(numbers)
        return rows

    def read_labels(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the label of each token of samples of one segment, int64 [len(indices), length + 1]."""
        groups, length = self._groups(np.asarray(indices))
        rows = np.empty((len(indices), length + 1), dtype=np.int64)
        for chosen, cursor, numbers in groups:
            rows[chosen] = cursor.read_labels(numbers)
        return rows

    def layout(self, indices: Sequence[int] | np.ndarray) -> RowLayout:
        """Return where the documents of samples of one segment start."""
        groups, length = self._groups(np.asarray(indices))
        starts = np.empty((len(indices), length + 1), dtype=np.int64)
        lengths = np.empty(len(indices), dtype=np.int64)
        for chosen, cursor, numbers in groups:
            starts[chosen], lengths[chosen] = cursor.layout(numbers)
        return RowLayout(starts, lengths)

    def _groups(self, indices: np.ndarray) -> tuple[list[tuple[np.ndarray, StreamCursor, np.ndarray]], int]:
        """Return the samples of each dataset, which of them they are, and the length of all."""
        number = self._number_of_segment(int(indices.min()))
        segment = self.segments[number]
        order = self._orders[number]
        places = indices - segment.first
        assert places.min() >= 0, "samples before the first segment are not known"
        assert places.max() < segment.samples, "a batch lies within one segment"
        datasets = order.datasets[places]
        groups = []
        for dataset in np.unique(datasets).tolist():
            chosen = datasets == dataset
            groups.append((chosen, order.cursors[dataset], order.numbers[places[chosen]]))
        return groups, segment.seq_length
