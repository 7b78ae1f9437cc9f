"""Passes over the documents of a dataset, which can be read in samples of any length.

A pass is a stream of tokens: documents in random order, joined. How far it has been read is its state, an array.
Samples are a function of the state and their length:

    GptNeoxPasses    all passes of a run as gpt-neox joins and shuffles them, for one length
        state        [samples read]
    LanePass         one pass, for any length, in lanes
        state        [tokens read of lane 0, of lane 1, ...]

The lanes divide the stream into equal stretches. Samples are taken from the lanes in turn, so that neighbours in a long
document do not follow each other in training:

    stream    | document 7 | document 2 |    document 9    | document 4 |  document 0  | ...
    lanes     |--------- lane 0 ---------|--------- lane 1 ---------|--------- lane 2 ---------|
    samples   | 0 | 3 | 6 | 9 | 12 |  .  | 1 | 4 | 7 | 10 | 13 | .  | 2 | 5 | 8 | 11 | 14 | .  |

Since each lane counts its tokens, the length of samples can change at any time, and no token is read twice. Less than a
sample is left over at the end of each lane.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from neox.data.samples.index_maps import IndexMaps
from neox.data.samples.map_cache import load_or_build
from neox.data.samples.rows import SampleCuts
from neox.data.token_files.indexed_dataset import IndexedDataset

_FORMAT = "neox pass 1"
_SEED = 11  # keeps the draws apart from others with the same seed
_LANE_TOKENS = 1 << 20  # smallest size of a lane; what is left over at its end is a small part of it
_MAX_LANES = 256
_NUMBERS = 1 << 44  # numbers of samples, or of entries, of one pass; more than any pass has


class DocumentPass(Protocol):
    """Documents in an order, from which samples are cut; a state says how far it has been read."""

    def first_state(self) -> np.ndarray:
        """Return the state before the first sample."""

    def samples_left(self, state: np.ndarray, length: int) -> int:
        """Return the number of samples of a length that are left after a state."""

    def state_after(self, state: np.ndarray, length: int, count: int) -> np.ndarray:
        """Return the state after `count` further samples of a length."""

    def cuts(self, state: np.ndarray, length: int, numbers: np.ndarray) -> SampleCuts:
        """Return where samples of a length are cut. They are numbered from 0 after the state."""


class GptNeoxPasses:
    """All passes of a run in gpt-neox's order, which joins them and shuffles samples of one length."""

    def __init__(self, maps: IndexMaps, length: int) -> None:
        self.maps = maps
        self.length = length

    def first_state(self) -> np.ndarray:
        """Return the number of samples read, 0."""
        return np.zeros(1, dtype=np.int64)

    def samples_left(self, state: np.ndarray, length: int) -> int:
        """Return the number of samples that are left; none of another length."""
        if length != self.length:
            return 0
        return max(0, len(self.maps.shuffle_map) - int(state[0]))

    def state_after(self, state: np.ndarray, length: int, count: int) -> np.ndarray:
        """Return the number of samples read after further ones."""
        return state + count

    def cuts(self, state: np.ndarray, length: int, numbers: np.ndarray) -> SampleCuts:
        """Return where samples are cut, as `GPTDataset` does."""
        samples = self.maps.shuffle_map[numbers + state[0]].astype(np.intp)
        sample_map = self.maps.sample_map
        return SampleCuts(self.maps.document_map, sample_map[samples], sample_map[samples + 1], samples)

    def unread_documents(self, state: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the documents without any token that is read, int32, one entry for each time they would be read.

        Args:
            state: Number of samples read.
            sizes: Number of tokens of every sequence of the dataset.
        """
        samples = len(self.maps.shuffle_map)
        is_read = np.zeros(samples + 1, dtype=np.int64)  # the last one stands for tokens after the last sample
        is_read[self.maps.shuffle_map[: int(state[0])]] = 1
        read_before = np.append(0, np.cumsum(is_read))  # samples before each one
        ends = np.cumsum(sizes[self.maps.document_map], dtype=np.int64)
        begins = ends - sizes[self.maps.document_map]
        first_samples = np.minimum(begins // self.length, samples)
        last_samples = np.minimum(np.maximum(ends - 1, begins) // self.length, samples)
        touched = read_before[last_samples + 1] - read_before[first_samples]
        return np.asarray(self.maps.document_map[touched == 0])


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
        # Lanes take turns until the first ones run out; then the others continue. A level begins when lanes run out.
        #
        #     capacity    round 0   round 1   round 2      levels  0 (lanes 0, 1, 2), 1 (lanes 0, 2), 3 (none)
        #     lane 0: 3      0         3         5         firsts  0, 3, 7
        #     lane 1: 1      1
        #     lane 2: 3      2         4         6
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


class DocumentOrder(NamedTuple):
    """Order of the documents of a pass.

    Attributes:
        documents: Numbers of the sequences, int32 [entries].
        ends: Number of tokens up to the end of each entry, int64 [entries].
    """

    documents: np.ndarray
    ends: np.ndarray


class LanePass:
    """One pass over documents in random order, divided into lanes.

    Attributes:
        indexed: Token dataset.
        documents: Numbers of the sequences.
        number: Number of the pass, from 0; -1 for documents left over by gpt-neox's order.
    """

    def __init__(
        self, indexed: IndexedDataset, documents: np.ndarray, number: int, seed: int, cache_dir: str | Path | None
    ) -> None:
        """Describe a pass. Its order is built or loaded when it is needed.

        Args:
            indexed: Token dataset.
            documents: Numbers of the sequences.
            number: Number of the pass.
            seed: Seed of the order.
            cache_dir: Directory that keeps the order between runs; None builds it in memory.
        """
        self.indexed = indexed
        self.documents = documents
        self.number = number
        self._seed = seed
        self._cache_dir = cache_dir
        self._rest: tuple[int, bytes, Lanes] | None = None

    @cached_property
    def bounds(self) -> np.ndarray:
        """First token of each lane, and the end of the last one."""
        return lane_bounds(int(self.indexed.sizes[self.documents].sum(dtype=np.int64)))

    @cached_property
    def order(self) -> DocumentOrder:
        """Order of the documents."""
        sizes = self.indexed.sizes[self.documents]

        def build() -> dict[str, np.ndarray]:
            random = np.random.default_rng([self._seed, _SEED, self.number + 1])
            order = random.permutation(len(self.documents))
            documents = self.documents[order].astype(np.int32)
            return {"documents": documents, "ends": np.cumsum(sizes[order], dtype=np.int64)}

        if self._cache_dir is None:
            return DocumentOrder(**build())
        digest = hashlib.sha256(f"{_FORMAT} {self._seed} {self.number}\n".encode())
        digest.update(np.ascontiguousarray(self.documents, dtype=np.int64).data)
        digest.update(np.ascontiguousarray(sizes, dtype=np.int64).data)
        key = digest.hexdigest()[:32]
        return DocumentOrder(**load_or_build(self._cache_dir, key, DocumentOrder._fields, build))

    def release(self) -> None:
        """Release the memory of the order. It is built or loaded again when it is needed."""
        self.__dict__.pop("order", None)

    def first_state(self) -> np.ndarray:
        """Return the number of tokens read of each lane, 0."""
        return np.zeros(len(self.bounds) - 1, dtype=np.int64)

    def samples_left(self, state: np.ndarray, length: int) -> int:
        """Return the number of samples that are left."""
        return self._lanes(state, length).samples

    def state_after(self, state: np.ndarray, length: int, count: int) -> np.ndarray:
        """Return the number of tokens read of each lane after further samples."""
        return self._lanes(state, length).offsets_after(count)

    def cuts(self, state: np.ndarray, length: int, numbers: np.ndarray) -> SampleCuts:
        """Return where samples are cut."""
        starts = self._lanes(state, length).starts(numbers)
        order = self.order
        first_number = (self.number + 2) * _NUMBERS  # gpt-neox's order has the numbers before
        return SampleCuts(
            documents=order.documents,
            firsts=self._places(order, starts),
            lasts=self._places(order, starts + length),
            numbers=first_number + starts,
            first_entry=first_number,
        )

    def _lanes(self, state: np.ndarray, length: int) -> Lanes:
        """Return what is left after a state. The last result is kept."""
        key = state.tobytes()
        rest = self._rest
        if rest is None or rest[0] != length or rest[1] != key:
            rest = (length, key, Lanes(self.bounds, state, length))
            self._rest = rest
        return rest[2]

    def _places(self, order: DocumentOrder, tokens: np.ndarray) -> np.ndarray:
        """Return the entry of tokens of the stream, and their offset in its document [tokens, 2]."""
        entries = np.searchsorted(order.ends, tokens, side="right")
        sizes = self.indexed.sizes[order.documents[entries]]
        offsets = tokens - (order.ends[entries] - sizes)
        return np.stack([entries, offsets], axis=1)
