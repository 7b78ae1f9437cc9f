"""Endless samples of one dataset, which go on wherever an earlier run or stage has stopped."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np

from neox.data.mixtures.passes import DocumentPass, GptNeoxPasses, LanePass
from neox.data.samples.rows import RowLayout, SampleCuts, TrainingDocuments
from neox.errors import DataError

_KEPT_ORDERS = 2  # passes before the current one whose order stays in memory


class SamplesRead(NamedTuple):
    """Samples that were read one after another.

    Attributes:
        length: Number of tokens of a sample's input.
        samples: Number of samples.
    """

    length: int
    samples: int


class DatasetStream:
    """Samples of one dataset, pass after pass, each in another order.

    A sample depends on the dataset, the seed, and the lengths and numbers of the samples read before it. It does not
    depend on weights, other datasets or the length of the run. A dataset that was first read in gpt-neox's order goes
    on with the rest of that order. If samples of another length are wanted, it goes on with those documents of it that
    are unread.
    """

    def __init__(self, part: TrainingDocuments, seed: int, gpt_neox: GptNeoxPasses | None = None) -> None:
        """Describe the stream.

        Args:
            part: Documents to read.
            seed: Seed of the orders.
            gpt_neox: What was read first, in gpt-neox's order; None if there is nothing.
        """
        self.rows = part.rows
        self.documents = np.arange(part.documents.start, part.documents.stop, dtype=np.int32)
        self.seed = seed
        self.cache_dir = part.cache_dir
        self.first: DocumentPass = gpt_neox or self._pass(0)

    def samples_of_pass(self, length: int) -> int:
        """Return the number of samples of a length in one pass. Raises DataError if there is none."""
        whole = self._pass(0)
        samples = whole.room(whole.start(), length)
        if not samples:
            raise DataError(
                f"{self.rows.indexed.prefix}: its documents hold fewer than seq_length + 1 = {length + 1} tokens, not "
                "one sample; use more data or a shorter seq_length"
            )
        return samples

    def after(self, history: Sequence[SamplesRead], length: int) -> Cursor:
        """Return the samples of a length that follow those of a history."""
        self.samples_of_pass(length)
        current = self.first
        state = current.start()
        for read in history:
            count = read.samples
            while count > (room := current.room(state, read.length)):
                count -= room
                current, state = self.following(current, current.after(state, read.length, room))
            state = current.after(state, read.length, count)
        return Cursor(self, current, state, length)

    def following(self, current: DocumentPass, state: np.ndarray) -> tuple[DocumentPass, np.ndarray]:
        """Return what is read after a pass, and its first state."""
        after: LanePass = self._pass(0)
        if isinstance(current, GptNeoxPasses):
            unread = current.unread_documents(state, self.rows.indexed.sizes)
            if len(unread):
                after = LanePass(self.rows.indexed, unread, -1, self.seed, self.cache_dir)
        elif isinstance(current, LanePass):
            after = self._pass(current.number + 1)
        return after, after.start()

    def _pass(self, number: int) -> LanePass:
        return LanePass(self.rows.indexed, self.documents, number, self.seed, self.cache_dir)


class _PassSamples(NamedTuple):
    """Samples of one pass.

    Attributes:
        first: Number of the first one.
        source: The pass.
        state: State of the pass before it.
    """

    first: int
    source: DocumentPass
    state: np.ndarray


class Cursor:
    """Samples of one length from a place of a stream on, numbered from 0. Threads may read at the same time."""

    def __init__(self, stream: DatasetStream, current: DocumentPass, state: np.ndarray, length: int) -> None:
        self.stream = stream
        self.length = length
        self._parts = [_PassSamples(0, current, state)]
        self._end = current.room(state, length)  # of the samples of all parts
        self._lock = Lock()

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Return the tokens of samples [samples, length + 1]."""
        rows = np.empty((len(numbers), self.length + 1), dtype=self.stream.rows.dtype)
        for chosen, cuts in self._cuts(numbers):
            rows[chosen] = self.stream.rows.read(cuts)
        return rows

    def read_labels(self, numbers: np.ndarray) -> np.ndarray:
        """Return the label of each token of samples [samples, length + 1]."""
        rows = np.empty((len(numbers), self.length + 1), dtype=self.stream.rows.label_dtype)
        for chosen, cuts in self._cuts(numbers):
            rows[chosen] = self.stream.rows.read_labels(cuts)
        return rows

    def layout(self, numbers: np.ndarray) -> RowLayout:
        """Return where the documents of samples start."""
        starts = np.empty((len(numbers), self.length + 1), dtype=np.int64)
        lengths = np.empty(len(numbers), dtype=np.int64)
        for chosen, cuts in self._cuts(numbers):
            starts[chosen], lengths[chosen] = self.stream.rows.layout(cuts)
        return RowLayout(starts, lengths)

    def _cuts(self, numbers: np.ndarray) -> list[tuple[np.ndarray, SampleCuts]]:
        """Return which of the samples each pass has, and where they are cut."""
        with self._lock:
            self._extend(int(numbers.max(initial=0)))
            firsts = [part.first for part in self._parts]
        owners = np.searchsorted(firsts, numbers, side="right") - 1
        result = []
        for owner in np.unique(owners).tolist():
            chosen = owners == owner
            part = self._parts[owner]
            result.append((chosen, part.source.cuts(part.state, self.length, numbers[chosen] - part.first)))
        return result

    def _extend(self, number: int) -> None:
        """Add passes up to the one with a sample."""
        while number >= self._end:
            last = self._parts[-1]
            done = last.source.after(last.state, self.length, self._end - last.first)
            source, state = self.stream.following(last.source, done)
            self._parts.append(_PassSamples(self._end, source, state))
            self._end += source.room(state, self.length)
            for part in self._parts[-_KEPT_ORDERS - 2 : -_KEPT_ORDERS - 1]:
                if isinstance(part.source, LanePass):
                    part.source.release()
