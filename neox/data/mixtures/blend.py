"""Blends of datasets, and their weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from neox.config.sections.data import MOST_DATASETS
from neox.data.masked.sentence_pairs import SentencePairDataset
from neox.data.samples.gpt_dataset import GPTDataset
from neox.data.samples.map_cache import load_or_build
from neox.data.samples.rows import RowLayout
from neox.errors import DataError

SampleDataset = GPTDataset | SentencePairDataset
"""Samples of one token dataset."""

_LANES = 1024  # stretches of the order that are computed at once
_WARM_UP = 512  # steps before a stretch in which its guessed start becomes exact
_MIN_SAMPLES_FOR_LANES = 20_000  # below, starting the lanes takes longer than they save
_SURPLUS = 1.005  # as in gpt-neox; shares are only as even as whole samples allow


class BlendedDataset:
    """Samples of several datasets in fixed proportions, in gpt-neox's order.

    The order depends on the weights only. After every sample, each dataset has given its share as nearly as whole
    samples allow. The length is the sum of the lengths of the datasets, as in gpt-neox. A dataset that ends too early
    for its weight starts again.

    Attributes:
        datasets: Blended datasets.
        shares: Weight of each dataset.
        seq_length: Number of tokens of a sample's input.
        row_width: Number of values in a row of `read`.
        dtype: Dtype of the rows of `read`.
        num_samples: Number of samples that can be read.
        dataset_index: Number of the dataset of each sample, uint8 [num_samples].
        dataset_sample_index: Number of each sample in its dataset, int64 [num_samples].
    """

    def __init__(
        self, datasets: Sequence[SampleDataset], weights: Sequence[float], cache_dir: str | Path | None = None
    ) -> None:
        """Build or load the order of samples.

        Args:
            datasets: 1 to 254 datasets with the same `seq_length`.
            weights: Weight of each dataset. Their sum need not be 1.
            cache_dir: Directory that keeps the order between runs; None builds it in memory.

        Raises:
            DataError: If there are too few or too many datasets, or weights or `seq_length` do not fit.
        """
        if len(datasets) != len(weights) or not 1 <= len(datasets) <= MOST_DATASETS:
            raise DataError(
                f"a blend needs 1 to {MOST_DATASETS} datasets and a weight for each, not {len(datasets)} datasets and "
                f"{len(weights)} weights"
            )
        lengths = {dataset.seq_length for dataset in datasets}
        if len(lengths) > 1:
            raise DataError(f"datasets of a blend must have one seq_length, not {sorted(lengths)}")
        self.datasets = tuple(datasets)
        self.shares = tuple(weights)
        self.seq_length = datasets[0].seq_length
        self.row_width = datasets[0].row_width
        self.dtype = np.result_type(*(dataset.dtype for dataset in datasets))
        self.num_samples = sum(len(dataset) for dataset in datasets)
        shares = np.asarray(weights, dtype=np.float64)

        def build() -> dict[str, np.ndarray]:
            dataset_index, dataset_sample_index = blend_indices(shares, self.num_samples)
            return {"dataset_index": dataset_index, "dataset_sample_index": dataset_sample_index}

        key = hashlib.sha256(f"neox blend 1 {shares.tolist()} {self.num_samples}".encode()).hexdigest()[:32]
        arrays = load_or_build(cache_dir, key, ("dataset_index", "dataset_sample_index"), build)
        self.dataset_index = arrays["dataset_index"]
        self.dataset_sample_index = arrays["dataset_sample_index"]

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return one sample, int64 [seq_length + 1]."""
        return np.asarray(self.read([index])[0], dtype=np.int64)

    @property
    def has_labels(self) -> bool:
        """Whether a dataset has tokens that are not predicted."""
        return any(dataset.has_labels for dataset in self.datasets)

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return samples [len(indices), row_width], in a dtype that can hold the ids of every dataset."""
        return self._rows(indices, lambda dataset, samples: dataset.read(samples), self.dtype)

    def read_labels(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the label of each token of samples, int64 [len(indices), seq_length + 1]; see `GPTDataset`."""
        return self._rows(indices, lambda dataset, samples: dataset.read_labels(samples), np.dtype(np.int64))

    def layout(self, indices: Sequence[int] | np.ndarray) -> RowLayout:
        """Return where the documents of samples start, and where their padding does."""
        starts = np.empty((len(indices), self.row_width), dtype=np.int64)
        lengths = np.empty(len(indices), dtype=np.int64)
        for from_this, dataset, samples in self._by_dataset(indices):
            starts[from_this], lengths[from_this] = dataset.layout(samples)
        return RowLayout(starts, lengths)

    def _rows(
        self,
        indices: Sequence[int] | np.ndarray,
        read: Callable[[SampleDataset, np.ndarray], np.ndarray],
        dtype: np.dtype,
    ) -> np.ndarray:
        """Return rows of samples. `read` reads samples of one dataset."""
        rows = np.empty((len(indices), self.row_width), dtype=dtype)
        for from_this, dataset, samples in self._by_dataset(indices):
            rows[from_this] = read(dataset, samples)
        return rows

    def _by_dataset(
        self, indices: Sequence[int] | np.ndarray
    ) -> Iterator[tuple[np.ndarray, SampleDataset, np.ndarray]]:
        """Yield which of the samples each dataset has, the dataset, and their numbers there."""
        chosen = self.dataset_index[indices]
        samples = self.dataset_sample_index[indices]
        for number in np.unique(chosen):
            dataset = self.datasets[number]
            from_this = chosen == number
            wanted = samples[from_this]
            repeated = wanted % max(1, len(dataset))
            yield from_this, dataset, np.where(wanted < dataset.num_samples, wanted, repeated)


def blend_indices(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute gpt-neox's order of a blend.

    Sample i comes from the dataset with the largest value of weight * max(i, 1) - number of samples given so far. Among
    equal values the first dataset is chosen.

    The result is the same as if all steps were computed one after another, but many stretches are computed at once. Two
    computations that start with different counts soon agree. So each stretch starts a little early with a guess. It is
    kept only if its counts at its start equal those at the end of the stretch before it. Otherwise it is computed again
    step by step.

    Args:
        weights: Weight of each dataset [datasets]. Their sum need not be 1.
        size: Number of samples.

    Returns:
        Dataset of each sample, uint8 [size], and number of the sample in that dataset, int64 [size].
    """
    weights = weights / weights.sum()
    chosen = np.zeros(size, dtype=np.uint8)
    counts = np.zeros(len(weights))
    if size < _MIN_SAMPLES_FOR_LANES:
        _choose_one_by_one(weights, chosen, counts, 0, size)
    else:
        start = size % _LANES + _WARM_UP
        _choose_one_by_one(weights, chosen, counts, 0, start)
        _choose_in_lanes(weights, chosen, counts, start)
    return chosen, _numbered(chosen, len(weights))


def _choose_one_by_one(weights: np.ndarray, chosen: np.ndarray, counts: np.ndarray, start: int, stop: int) -> None:
    """Compute steps [start, stop) one after another.

    Args:
        weights: Weight of each dataset [datasets]; their sum is 1.
        chosen: Dataset of each step, written from `start` to `stop` [steps].
        counts: Samples given by each dataset before `start`, which become those before `stop` [datasets].
        start: First step.
        stop: End of the steps.
    """
    for i in range(start, stop):
        best = int(np.argmax(weights * max(i, 1) - counts))
        chosen[i] = best
        counts[best] += 1


def _choose_in_lanes(weights: np.ndarray, chosen: np.ndarray, counts: np.ndarray, start: int) -> None:
    """Compute all steps from `start` on, in _LANES stretches at once. Arguments as for `_choose_one_by_one`.

    The stretches have the same length; the last one may be shorter.
    """
    length: int = -(-(len(chosen) - start) // _LANES)
    lane_starts = np.arange(start, len(chosen), length)  # [lanes]
    lanes = np.arange(len(lane_starts))
    steps = (lane_starts - _WARM_UP).astype(np.float64)
    lane_counts = _guessed_counts(weights, steps)  # [lanes, datasets]
    counts_at_start = lane_counts
    lane_choices = np.empty((length, len(lanes)), dtype=np.uint8)
    for step in range(-_WARM_UP, length):
        if step == 0:
            counts_at_start = lane_counts.copy()
        error = weights * np.maximum(steps, 1.0)[:, None]
        error -= lane_counts
        best = error.argmax(axis=1)
        lane_counts[lanes, best] += 1
        steps += 1
        if step >= 0:
            lane_choices[step] = best
    for lane, first in enumerate(lane_starts.tolist()):
        stop = min(first + length, len(chosen))
        if np.array_equal(counts_at_start[lane], counts):
            chosen[first:stop] = lane_choices[: stop - first, lane]
            counts += np.bincount(chosen[first:stop], minlength=len(counts))
        else:
            _choose_one_by_one(weights, chosen, counts, first, stop)


def _guessed_counts(weights: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return likely counts of samples before given steps.

    Each count is its share of the steps, rounded down; those with the largest remainders are then raised by 1, so that
    the sum is right.

    Args:
        weights: Weight of each dataset [datasets]; their sum is 1.
        steps: Number of samples given so far in each lane [lanes].

    Returns:
        Counts [lanes, datasets].
    """
    shares = steps[:, None] * weights
    counts: np.ndarray = np.floor(shares)
    missing = steps - counts.sum(axis=1)
    rank = (shares - counts).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    counts += rank >= (len(weights) - missing)[:, None]
    return counts


def _numbered(chosen: np.ndarray, datasets: int) -> np.ndarray:
    """Return the number of each sample in its dataset. The samples of a dataset are numbered in their order."""
    numbers = np.empty(len(chosen), dtype=np.int64)
    for dataset in range(datasets):
        steps = np.flatnonzero(chosen == dataset)
        numbers[steps] = np.arange(len(steps))
    return numbers


def normalized(weights: Sequence[float]) -> list[float]:
    """Scale weights so that their sum is 1. Raises DataError if one is negative or none is positive."""
    total = sum(weights)
    if not weights or min(weights) < 0 or not 0 < total < math.inf:
        raise DataError(f"weights of a blend must not be negative and not all be 0: {list(weights)}")
    return [weight / total for weight in weights]


def samples_of_each(weights: Sequence[float], num_samples: int) -> list[int]:
    """Return the number of samples that each dataset must have for `num_samples` of a blend. Weights have sum 1."""
    return [math.ceil(num_samples * weight * _SURPLUS) for weight in weights]


def weights_by_documents(documents: Sequence[int], alpha: float) -> list[float]:
    """Return the weights of NeoX's `weight_by_num_documents`.

    With the share p of a dataset in all documents, its weight is proportional to p ** alpha / sum(p ** alpha) times
    (1 - p). The first factor raises small shares (https://arxiv.org/abs/1911.02116). The second is NeoX's own.

    Args:
        documents: Number of documents of each dataset. A single dataset has weight 1. (NeoX divides by zero there.)
        alpha: Exponent, NeoX's `weighted_sampler_alpha`.

    Raises:
        DataError: If the datasets have no documents.
    """
    if len(documents) == 1:
        return [1.0]
    total = sum(documents)
    if total == 0:
        raise DataError("weight_by_num_documents needs documents, and the datasets have none")
    shares = [n / total for n in documents]
    raised = [share**alpha for share in shares]
    scale = sum(raised)
    return normalized([power / scale * (1 - share) for power, share in zip(raised, shares, strict=True)])
