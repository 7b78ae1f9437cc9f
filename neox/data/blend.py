"""Several datasets as one: at every point each has given its share of samples, as nearly as whole samples allow."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from neox.data.gpt_dataset import GPTDataset
from neox.data.map_cache import load_or_build
from neox.errors import DataError

_LANES = 1024
_WARM_UP = 512
_SERIAL = 20_000  # below this many samples, starting the lanes costs more than they save


class BlendedDataset:
    """Samples of several datasets in fixed proportions; the order follows from the weights alone (gpt-neox's).

    Its length is the sum of theirs, as in gpt-neox, although a dataset with more than its share of weight ends sooner;
    its samples then begin again. cache_dir: where the order is kept between runs (None: in memory).
    """

    def __init__(
        self, datasets: Sequence[GPTDataset], weights: Sequence[float], cache_dir: str | Path | None = None
    ) -> None:
        if len(datasets) != len(weights) or not datasets or len(datasets) >= 255:
            raise DataError(
                f"a blend needs 1 to 254 datasets and a weight for each, not {len(datasets)}, {len(weights)}"
            )
        lengths = {dataset.seq_length for dataset in datasets}
        if len(lengths) > 1:
            raise DataError(f"datasets of a blend must have one seq_length, not {sorted(lengths)}")
        self.datasets = tuple(datasets)
        self.seq_length = datasets[0].seq_length
        self.dtype = np.result_type(*(dataset.indexed.dtype for dataset in datasets))
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
        """Sample `index` as int64 [seq_length + 1]."""
        return self.read([index])[0].astype(np.int64)

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Samples `indices` as [len(indices), seq_length + 1], in a dtype that holds every dataset's ids."""
        chosen, samples = self.dataset_index[indices], self.dataset_sample_index[indices]
        rows = np.empty((len(chosen), self.seq_length + 1), dtype=self.dtype)
        for number in np.unique(chosen):
            dataset, where = self.datasets[number], chosen == number
            wanted = samples[where]
            rows[where] = dataset.read(np.where(wanted < dataset.num_samples, wanted, wanted % max(1, len(dataset))))
        return rows


def blend_indices(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of `size` samples: which dataset (uint8), and which of its samples (int64).

    Sample i comes from the dataset furthest behind its share, weight * max(i, 1) - samples given so far; the first of
    equals. Weights are normalized here. Equal to one step after another, but done in many stretches at once: two runs
    of this rule that start differently soon agree, so each stretch starts a little early from a guess, and is kept only
    when it is found to start exactly as the one before it ended (otherwise it is walked step by step).
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
    """Take steps [start, stop) one by one; `counts` [datasets] moves along."""
    for i in range(start, stop):
        best = int(np.argmax(weights * max(i, 1) - counts))
        chosen[i] = best
        counts[best] += 1


def _walk_lanes(weights: np.ndarray, chosen: np.ndarray, counts: np.ndarray, start: int) -> None:
    """Take all steps from `start` on in _LANES stretches of equal length side by side (the last may be shorter)."""
    length = -(-(len(chosen) - start) // _LANES)
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
    for lane, first in enumerate(firsts):
        stop = min(first + length, len(chosen))
        if np.array_equal(begins[lane], counts):
            chosen[first:stop] = picks[: stop - first, lane]
            counts += np.bincount(chosen[first:stop], minlength=len(counts))
        else:
            _walk(weights, chosen, counts, int(first), int(stop))


def _guess(weights: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Counts [lanes, datasets] that add up to `steps` and are near the shares: floors, then the largest remainders."""
    shares = steps[:, None] * weights
    counts = np.floor(shares)
    missing = steps - counts.sum(axis=1)
    rank = (shares - counts).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    counts += rank >= (len(weights) - missing)[:, None]
    return counts


def _numbered(chosen: np.ndarray, datasets: int) -> np.ndarray:
    """Number each dataset's samples in the order they are taken."""
    numbers = np.empty(len(chosen), dtype=np.int64)
    for dataset in range(datasets):
        where = np.flatnonzero(chosen == dataset)
        numbers[where] = np.arange(len(where))
    return numbers
