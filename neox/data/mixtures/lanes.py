"""Order of the samples within one pass over a dataset, for any lengths of samples.

A pass is a stream of tokens: the documents in random order, joined. The stream is divided into lanes of equal length.
Samples are taken from the lanes in turn, so that neighbours in a long document do not follow each other in training:

    lane 0    | sample 0 | sample 3 | sample 6 | ...
    lane 1    | sample 1 | sample 4 | sample 7 | ...
    lane 2    | sample 2 | sample 5 | sample 8 | ...

How far a pass has been read is one number for each lane, its tokens read. So the length of samples can change at any
time, and no token is read twice. Less than a sample is left over at the end of each lane.
"""

from __future__ import annotations

import numpy as np

_LANE_TOKENS = 1 << 20  # smallest size of a lane; what is left over at its end is a small part of it
_MAX_LANES = 256


def lane_bounds(tokens: int) -> np.ndarray:
    """Return the first token of each lane, and the end of the last one, int64 [lanes + 1]."""
    lanes = min(_MAX_LANES, max(1, tokens // _LANE_TOKENS))
    return np.arange(lanes + 1, dtype=np.int64) * tokens // lanes


class Lanes:
    """The rest of a pass, as samples of one length.

    Attributes:
        bounds: First token of each lane, and the end of the last one, int64 [lanes + 1].
        offsets: Number of tokens that are read of each lane, int64 [lanes].
        length: Number of tokens of a sample's input. A sample shares its last token with the next one.
        samples: Number of samples.
    """

    def __init__(self, bounds: np.ndarray, offsets: np.ndarray, length: int) -> None:
        self.bounds = bounds
        self.offsets = offsets
        self.length = length
        sizes = np.diff(bounds)
        self._capacities = np.maximum(sizes - offsets - 1, 0) // length  # samples of each lane
        # Lanes take turns until the first ones run out; then the others go on. A level begins when lanes run out.
        self._levels = np.unique(np.append(self._capacities, 0))
        self._active = [np.flatnonzero(self._capacities > level) for level in self._levels[:-1]]
        counts = np.array([len(active) for active in self._active], dtype=np.int64)
        self._firsts = np.append(0, np.cumsum(np.diff(self._levels) * counts))  # first sample of each level
        self.samples = int(self._firsts[-1])

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """Return the first token of samples in the stream.

        Args:
            numbers: Numbers of samples, from 0, below `samples`.
        """
        levels = np.searchsorted(self._firsts, numbers, side="right") - 1
        starts = np.empty(len(numbers), dtype=np.int64)
        for level in np.unique(levels):
            in_level = levels == level
            active = self._active[level]
            rounds, turns = np.divmod(numbers[in_level] - self._firsts[level], len(active))
            lanes = active[turns]
            samples_before = self._levels[level] + rounds  # in the lane
            starts[in_level] = self.bounds[lanes] + self.offsets[lanes] + samples_before * self.length
        return starts

    def offsets_after(self, count: int) -> np.ndarray:
        """Return the tokens that are read of each lane after the first `count` samples, int64 [lanes]."""
        if count == self.samples:
            taken = self._capacities
        else:
            level = int(np.searchsorted(self._firsts, count, side="right")) - 1
            active = self._active[level]
            rounds, turns = divmod(count - int(self._firsts[level]), len(active))
            taken = np.minimum(self._capacities, self._levels[level] + rounds)
            taken[active[:turns]] += 1
        return self.offsets + taken * self.length
