"""Endless samples of one dataset, which continue wherever an earlier run or stage has stopped.

    gpt-neox's order, if the run began with it      passes of the stream, each in an order of its own
    |- read -|- rest, in samples of one length -|   |- documents that it left unread -|- pass 0 -|- pass 1 -| ...

A `DatasetStream` is the whole line. `after` follows what has been read to a place in it, from which a `StreamCursor`
reads samples of one length.
"""

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
    depend on weights, other datasets or the length of the run. A dataset that was first read in gpt-neox's order
    continues with the rest of that order. If samples of another length are wanted, it continues with those documents of
    it that are unread.
    """

    def __init__(self, documents: TrainingDocuments, seed: int, gpt_neox: GptNeoxPasses | None = None) -> None:
        """Describe the stream.

        Args:
            documents: Documents to read.
            seed: Seed of the orders.
            gpt_neox: What was read first, in gpt-neox's order; None if there is nothing.
        """
        self.rows = documents.rows
        self.documents = np.arange(documents.documents.start, documents.documents.stop, dtype=np.int32)
        self.seed = seed
        self.cache_dir = documents.cache_dir
        self.first: DocumentPass = gpt_neox or self._pass(0)

    def samples_of_pass(self, length: int) -> int:
        """Return the number of samples of a length in one pass. Raises DataError if there is none."""
        whole = self._pass(0)
        samples = whole.samples_left(whole.first_state(), length)
        if not samples:
            raise DataError(
                f"{self.rows.indexed.prefix}: its documents hold fewer than seq_length + 1 = {length + 1} tokens, not "
                "one sample; use more data or a shorter seq_length"
            )
        return samples

    def after(self, history: Sequence[SamplesRead], length: int) -> StreamCursor:
        """Return the samples of a length that follow those of a history."""
        self.samples_of_pass(length)  # refuses a length that no pass has, which would never end
        current = self.first
        state = current.first_state()
        for read in history:
            count = read.samples
            left = current.samples_left(state, read.length)
            while count > left:
                count -= left
                current, state = self.following(current, current.state_after(state, read.length, left))
                left = current.samples_left(state, read.length)
            state = current.state_after(state, read.length, count)
        return StreamCursor(self, current, state, length)

    def following(self, current: DocumentPass, state: np.ndarray) -> tuple[DocumentPass, np.ndarray]:
        """Return the pass that is read after another one, and its first state.

        Args:
            current: A pass.
            state: Its state when no more samples are taken from it.
        """
        following = self._pass(0)
        if isinstance(current, GptNeoxPasses):
            unread = current.unread_documents(state, self.rows.indexed.sizes)
            if len(unread):
                following = LanePass(self.rows.indexed, unread, -1, self.seed, self.cache_dir)
        elif isinstance(current, LanePass):
            following = self._pass(current.number + 1)
        return following, following.first_state()

    def _pass(self, number: int) -> LanePass:
        return LanePass(self.rows.indexed, self.documents, number, self.seed, self.cache_dir)


class _CursorPass(NamedTuple):
    """Pass that a cursor reads.

    Attributes:
        first: Number of its first sample at the cursor.
        source: The pass.
        state: State of the pass before that sample.
    """

    first: int
    source: DocumentPass
    state: np.ndarray


class StreamCursor:
    """Samples of one length from a place of a stream on, numbered from 0. Threads may read at the same time."""

    def __init__(self, stream: DatasetStream, current: DocumentPass, state: np.ndarray, length: int) -> None:
        self.stream = stream
        self.length = length
        self._passes = [_CursorPass(0, current, state)]
        self._end = current.samples_left(state, length)  # of the samples of all passes
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
            firsts = [each.first for each in self._passes]
        owners = np.searchsorted(firsts, numbers, side="right") - 1
        result = []
        for owner in np.unique(owners).tolist():
            chosen = owners == owner
            first, source, state = self._passes[owner]
            result.append((chosen, source.cuts(state, self.length, numbers[chosen] - first)))
        return result

    def _extend(self, number: int) -> None:
        """Add passes up to the one with a sample."""
        while number >= self._end:
            last = self._passes[-1]
            done = last.source.state_after(last.state, self.length, self._end - last.first)
            source, state = self.stream.following(last.source, done)
            self._passes.append(_CursorPass(self._end, source, state))
            self._end += source.samples_left(state, self.length)
            for old in self._passes[-_KEPT_ORDERS - 2 : -_KEPT_ORDERS - 1]:
                if isinstance(old.source, LanePass):
                    old.source.release()
