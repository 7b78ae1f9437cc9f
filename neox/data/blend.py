"""Blends of datasets, and their weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from neox.data.gpt_dataset import GPTDataset
from neox.data.index_maps import load_or_build
from neox.data.sentence_pairs import SentencePairDataset
from neox.errors import DataError

Samples = GPTDataset | SentencePairDataset

_LANES = 1024
_WARM_UP = 512
_SERIAL = 20_000  # below this many samples, starting the lanes costs more than they save
_SURPLUS = 1.005  # gpt-neox's: a blend is only as even as whole samples allow, so each dataset gets half a percent more


class BlendedDataset:
    """Samples of several datasets in fixed proportions, in gpt-neox's order, which follows from the weights alone.

    At every sample, each dataset has given its share as nearly as whole samples allow. The length is the sum of the
    datasets' lengths, as in gpt-neox; a dataset with a larger weight than its share of the samples starts again.

    Attributes:
        datasets: The datasets.
        seq_length: Tokens of a sample's input.
        row_width: Numbers of a row of `read`.
        num_samples: Number of samples that can be read.
        dataset_index: Dataset of each sample, uint8 [num_samples].
        dataset_sample_index: Number of each sample in its dataset, int64 [num_samples].
    """

    def __init__(
        self, datasets: Sequence[Samples], weights: Sequence[float], cache_dir: str | Path | None = None
    ) -> None:
        """Build or load the order of samples.

        Args:
            datasets: 1 to 254 datasets of one `seq_length`.
            weights: Share of each dataset, normalized here.
            cache_dir: Directory where the order is kept between runs; None builds it in memory.

        Raises:
            DataError: If datasets and weights do not fit together.
        """
        if len(datasets) != len(weights) or not datasets or len(datasets) >= 255:
            raise DataError(
                f"a blend needs 1 to 254 datasets and a weight for each, not {len(datasets)}, {len(weights)}"
            )
        lengths = {dataset.seq_length for dataset in datasets}
        if len(lengths) > 1:
            raise DataError(f"datasets of a blend must have one seq_length, not {sorted(lengths)}")
        self.datasets = tuple(datasets)
        self.seq_length = datasets[0].seq_length
        self.row_width = datasets[0].row_width
        self.dtype = np.result_type(*(dataset.dtype for dataset in datasets))
        shares, size = np.asarray(weights, dtype=np.float64), sum(len(dataset) for dataset in datasets)
        key = hashlib.sha256(f"neox blend 1 {shares.tolist()} {size}".encode()).hexdigest()[:32]
        names = ("dataset_index", "dataset_sample_index")
        arrays = load_or_build(
            cache_dir, key, names, lambda: dict(zip(names, blend_indices(shares, size), strict=True))
        )
        self.dataset_index, self.dataset_sample_index = (arrays[name] for name in names)
        self.num_samples = size

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return sample `index`, int64 [seq_length + 1]."""
        return np.asarray(self.read([index])[0], dtype=np.int64)

    @property
    def has_labels(self) -> bool:
        """Whether a dataset has tokens that are not to be predicted."""
        return any(dataset.has_labels for dataset in self.datasets)

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return samples `indices` [len(indices), row_width], in a dtype that holds every dataset's ids."""
        return self._rows(indices, lambda dataset, samples: dataset.read(samples), self.dtype)

    def read_labels(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return labels of samples, int64 [len(indices), seq_length + 1], as `GPTDataset.read_labels`."""
        return self._rows(indices, lambda dataset, samples: dataset.read_labels(samples), np.dtype(np.int64))

    def _rows(
        self,
        indices: Sequence[int] | np.ndarray,
        read: Callable[[Samples, np.ndarray], np.ndarray],
        dtype: np.dtype,
    ) -> np.ndarray:
        chosen, samples = self.dataset_index[indices], self.dataset_sample_index[indices]
        rows = np.empty((len(chosen), self.row_width), dtype=dtype)
        for number in np.unique(chosen):
            dataset, where = self.datasets[number], chosen == number
            wanted = samples[where]
            rows[where] = read(dataset, np.where(wanted < dataset.num_samples, wanted, wanted % max(1, len(dataset))))
        return rows


def blend_indices(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute gpt-neox's order of a blend.

    Sample i comes from the dataset with the largest weight * max(i, 1) - samples given so far; the first of equals. The
    result equals that of one step after another, but many stretches of it are computed at once: two runs of the rule
    that start differently soon agree, so each stretch starts a little early from a guess, and is kept only if it starts
    exactly as the one before it ended (otherwise it is computed step by step).

    Args:
        weights: Share of each dataset, normalized here [datasets].
        size: Number of samples.

    Returns:
        Dataset of each sample, uint8 [size], and its number in that dataset, int64 [size].
    """
    weights = weights / weights.sum()
    chosen = np.zeros(size, dtype=np.uint8)
    counts = np.zeros(len(weights))
    if size < _SERIAL:
        _walk(weights, chosen, counts, 0, size)
    else:
        _walk(weights, chosen, counts, 0, size % _LANES + _WARM_UP)
        _walk_lanes(weights, chosen, counts, size % _LANES + _WARM_UP)
    return chosen, _numbered(chosen, len(weights))


def _walk(weights: np.ndarray, chosen: np.ndarray, counts: np.ndarray, start: int, stop: int) -> None:
    """Compute steps [start, stop) one by one; updates `counts` [datasets]."""
    for i in range(start, stop):
        best = int(np.argmax(weights * max(i, 1) - counts))
        chosen[i] = best
        counts[best] += 1


def _walk_lanes(weights: np.ndarray, chosen: np.ndarray, counts: np.ndarray, start: int) -> None:
    """Compute all steps from `start` on in _LANES stretches of equal length at once (the last may be shorter)."""
    length: int = -(-(len(chosen) - start) // _LANES)
    firsts = np.arange(start, len(chosen), length)
    lane_counts = _guess(weights, firsts - _WARM_UP)  # [lanes, datasets]
    steps = (firsts - _WARM_UP).astype(np.float64)
    rows = np.arange(len(firsts))
    picks = np.empty((length, len(firsts)), dtype=np.uint8)
    begins = lane_counts
    for step in range(-_WARM_UP, length):
        if step == 0:
            begins = lane_counts.copy()
        error = weights * np.maximum(steps, 1.0)[:, None]
        error -= lane_counts
        best = error.argmax(axis=1)
        lane_counts[rows, best] += 1
        steps += 1
        if step >= 0:
            picks[step] = best
    for lane, first in enumerate(firsts.tolist()):
        stop = min(first + length, len(chosen))
        if np.array_equal(begins[lane], counts):
            chosen[first:stop] = picks[: stop - first, lane]
            counts += np.bincount(chosen[first:stop], minlength=len(counts))
        else:
            _walk(weights, chosen, counts, first, stop)


def _guess(weights: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return counts [lanes, datasets] near the shares that add up to `steps`: floors, then the largest remainders."""
    shares = steps[:, None] * weights
    counts: np.ndarray = np.floor(shares)
    missing = steps - counts.sum(axis=1)
    rank = (shares - counts).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    counts += rank >= (len(weights) - missing)[:, None]
    return counts


def _numbered(chosen: np.ndarray, datasets: int) -> np.ndarray:
    """Number the samples of each dataset in the order in which they are taken."""
    numbers = np.empty(len(chosen), dtype=np.int64)
    for dataset in range(datasets):
        where = np.flatnonzero(chosen == dataset)
        numbers[where] = np.arange(len(where))
    return numbers


def normalized(weights: Sequence[float]) -> list[float]:
    """Scale weights to add up to 1. Raises DataError for a negative one, or if none is above 0."""
    total = sum(weights)
    if not weights or min(weights) < 0 or not 0 < total < math.inf:
        raise DataError(f"weights of a blend must not be negative and not all be 0: {list(weights)}")
    return [weight / total for weight in weights]


def samples_of_each(weights: Sequence[float], num_samples: int) -> list[int]:
    """Return how many samples each dataset must have for `num_samples` of a blend (weights add up to 1)."""
    return [math.ceil(num_samples * weight * _SURPLUS) for weight in weights]


def weights_by_documents(documents: Sequence[int], alpha: float) -> list[float]:
    """Return NeoX's `weight_by_num_documents`: p ~ n ** alpha, times 1 - n / sum(n), normalized.

    The first factor raises the share of small datasets (https://arxiv.org/abs/1911.02116); the second is NeoX's own.

    Args:
        documents: Documents of each dataset. One alone has weight 1 (NeoX's formula divides by zero there).
        alpha: NeoX's `weighted_sampler_alpha`.

    Raises:
        DataError: If the datasets have no documents.
    """
    if len(documents) == 1:
        return [1.0]
    total = sum(documents)
    if total == 0:
        raise DataError("weight_by_num_documents needs documents, and the datasets have none")
    shares = [n / total for n in documents]
    lifted = [share**alpha for share in shares]
    scale = sum(lifted)
    return normalized([lift / scale * (1 - share) for lift, share in zip(lifted, shares, strict=True)])
