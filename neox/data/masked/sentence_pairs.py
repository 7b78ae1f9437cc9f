"""Pairs of sentences as samples for masked language modelling (arXiv:1810.04805, arXiv:1909.11942)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neox.config.sections.data import SentencePairs
from neox.data.masked.masking import MaskingVocabulary, mask_tokens
from neox.data.samples.map_cache import load_or_build
from neox.data.samples.rows import RowLayout
from neox.data.token_files.indexed_dataset import IndexedDataset
from neox.errors import DataError

_FORMAT = "neox sentence pairs 1"
_SHORTEST = 2  # smallest number of tokens to which a sample is filled


@dataclass(frozen=True)
class SentencePairSettings:
    """Settings of samples of sentences.

    Attributes:
        seq_length: S, number of tokens of a sample with padding.
        max_predictions: P, largest number of masked tokens of a sample.
        pairs: Wrong second part that half of the samples get. With `nsp` it comes from another document, with `sop` the
            two parts are swapped. None makes samples of one part, for networks without a sentence head.
        mask_share: Share of the tokens that are masked.
        short_share: Share of the samples that are filled to a random length only.
        whole_words: Whether all pieces of a word are masked together.
    """

    seq_length: int
    max_predictions: int
    pairs: SentencePairs | None
    mask_share: float
    short_share: float
    whole_words: bool

    @property
    def room(self) -> int:
        """Number of tokens in a sample that are not special tokens."""
        special_tokens = 3 if self.pairs else 2  # [CLS], and [SEP] after each part
        return self.seq_length - special_tokens


class SentencePairDataset:
    """Masked samples of sentences.

    Consecutive sentences of a document form a run that fills a sample (or, for `short_share` of the runs, a random part
    of it). Each run is one sample in each pass. With pairs, the run is divided into two parts:

        [CLS] sentence 3, sentence 4 [SEP] sentence 5 [SEP]

    Each pass reads the runs in another order, divides them at other places and masks other tokens. All of this is a
    function of the seed and the number of the sample. If `nsp` takes the second part from another document, this pass
    does not read the rest of the run.

    Attributes:
        indexed: Dataset in which each sequence is a sentence.
        seq_length: Number of tokens of a sample with padding.
        num_samples: Number of samples, in whole passes.
        row_width: Number of values in a row of `read`.
        runs: First sentence, sentence after the last, and document of each run, int64 [runs, 3].
    """

    dtype = np.dtype(np.int64)
    has_labels = False

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        num_samples: int,
        settings: SentencePairSettings,
        vocabulary: MaskingVocabulary,
        seed: int,
        cache_dir: str | Path | None = None,
    ) -> None:
        """Build or load the runs of sentences.

        Args:
            indexed: Dataset in which each sequence is a sentence.
            documents: Numbers of the documents to use, with step 1.
            num_samples: Number of samples that are read in training. It determines the number of passes.
            settings: Settings of the samples.
            vocabulary: Vocabulary of the dataset.
            seed: Seed of all draws.
            cache_dir: Directory that keeps runs and orders between starts; None builds them in memory.

        Raises:
            DataError: If the documents do not exist, or hold no sample.
        """
        if documents.step != 1 or not 0 <= documents.start < documents.stop <= indexed.num_documents:
            raise DataError(
                f"{indexed.prefix} has {indexed.num_documents} documents; {documents} is not a range of them"
            )
        self.indexed = indexed
        self.settings = settings
        self.vocabulary = vocabulary
        self.seed = seed
        self.seq_length = settings.seq_length
        self.row_width = 2 * settings.seq_length + 3 * settings.max_predictions + 2
        self._cache_dir = cache_dir
        starts = np.asarray(indexed.document_index[documents.start : documents.stop + 1])
        self._key = self._content_key(starts)
        built = load_or_build(cache_dir, self._key, ("runs",), lambda: {"runs": self._build_runs(documents, starts)})
        self.runs = built["runs"]
        if not len(self.runs):
            why = "they have no sentences"
            if settings.pairs:
                why = "pairs need documents of at least two sentences"
            raise DataError(
                f"{indexed.prefix}: documents {documents.start} to {documents.stop} hold no sample: {why}; make the "
                "data with tools/preprocess_data.py --split-sentences"
            )
        if settings.pairs == "nsp" and self.runs[0, 2] == self.runs[-1, 2]:
            raise DataError(
                f"{indexed.prefix}: documents {documents.start} to {documents.stop} hold samples of one document only, "
                "and next sentence prediction takes the second part of half of the samples from another one; give more "
                "documents, or predict the order of sentences (sentence_pairs: sop)"
            )
        passes = max(1, -(-num_samples // len(self.runs)))
        self.num_samples = passes * len(self.runs)
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.num_samples

    def _content_key(self, starts: np.ndarray) -> str:
        """Return a hash of everything that determines the runs. `starts` are the first sentences of documents."""
        settings = self.settings
        parts = (_FORMAT, settings.room, bool(settings.pairs), settings.short_share, self.seed, len(self.indexed))
        digest = hashlib.sha256((" ".join(map(str, parts)) + "\n").encode())
        digest.update(np.ascontiguousarray(starts).data)
        digest.update(np.ascontiguousarray(self.indexed.sizes[int(starts[0]) : int(starts[-1])]).data)
        return digest.hexdigest()[:32]

    def _build_runs(self, documents: range, starts: np.ndarray) -> np.ndarray:
        """Join the sentences of each document to runs.

        Args:
            documents: Numbers of the documents.
            starts: First sentence of each document, and the end of the last one [documents + 1].

        Returns:
            First sentence, sentence after the last, and document of each run, int64 [runs, 3].
        """
        least = 2 if self.settings.pairs else 1  # sentences of a run
        random = np.random.default_rng([self.seed, 0])
        runs: list[tuple[int, int, int]] = []
        for document, first, stop in zip(documents, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            if stop - first < least:
                continue
            run_start = first
            length = 0
            wanted = self._random_length(random)
            for sentence, size in enumerate(self.indexed.sizes[first:stop].tolist(), start=first):
                length += size
                end = sentence + 1
                is_full = length >= wanted and end - run_start >= least and stop - end >= least
                if is_full or end == stop:
                    runs.append((run_start, end, document))
                    run_start = end
                    length = 0
                    wanted = self._random_length(random)
        return np.asarray(runs, dtype=np.int64).reshape(-1, 3)

    def _random_length(self, random: np.random.Generator) -> int:
        """Return the number of tokens with which a run is full."""
        if random.random() < self.settings.short_share:
            return int(random.integers(_SHORTEST, self.settings.room + 1))
        return self.settings.room

    def _order(self, number: int) -> np.ndarray:
        """Return the order of the runs in a pass. The orders of the last two passes are kept in memory."""
        if number not in self._orders:

            def build() -> dict[str, np.ndarray]:
                random = np.random.default_rng([self.seed, 1, number])
                return {"order": random.permutation(len(self.runs)).astype(np.uint32)}

            key = hashlib.sha256(f"{self._key} {number}".encode()).hexdigest()[:32]
            order = load_or_build(self._cache_dir, key, ("order",), build)["order"]
            kept = list(self._orders.items())[-1:]
            self._orders = dict([*kept, (number, order)])
        return self._orders[number]

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return samples as rows, int64 [len(indices), row_width]. `split_rows` splits them into fields."""
        return np.stack([self._row(int(index)) for index in indices])

    def _row(self, index: int) -> np.ndarray:
        """Return one sample: tokens [S], types [S], positions [P], ids [P], weights [P], length, next sentence."""
        pass_number, place = divmod(index, len(self.runs))
        random = np.random.default_rng([self.seed, 2, index])
        run = self.runs[self._order(pass_number)[place]]
        parts, label = self._parts(run, random)
        shorten(parts, self.settings.room, random)
        masked = mask_tokens(
            self._joined(parts),
            self.vocabulary,
            random,
            share=self.settings.mask_share,
            most=self.settings.max_predictions,
            whole_words=self.settings.whole_words,
        )
        length = len(masked.tokens)
        predictions = len(masked.positions)
        row = np.zeros(self.row_width, np.int64)
        tokens, types, positions, ids, weights, rest = np.split(row, self._field_ends())  # views of the row
        tokens[:length] = masked.tokens
        tokens[length:] = self.vocabulary.pad
        if len(parts) > 1:
            types[len(parts[0]) + 2 : length] = 1
        positions[:predictions] = masked.positions
        ids[:predictions] = masked.ids
        weights[:predictions] = 1
        rest[:] = [length, label]
        return row

    def _joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return `[CLS] part [SEP]`, or `[CLS] part [SEP] part [SEP]`, int64."""
        pieces = [np.array([self.vocabulary.cls], np.int64)]
        for part in parts:
            pieces.append(part.astype(np.int64))
            pieces.append(np.array([self.vocabulary.sep], np.int64))
        return np.concatenate(pieces)

    def _field_ends(self) -> np.ndarray:
        """Return the ends of the fields of a row, except the last one."""
        s = self.settings.seq_length
        p = self.settings.max_predictions
        return np.cumsum([s, s, p, p, p])

    def read_labels(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Raise NotImplementedError. The rows of `read` hold the labels."""
        raise NotImplementedError

    def layout(self, indices: Sequence[int] | np.ndarray) -> RowLayout:
        """Raise NotImplementedError. The rows of `read` hold the lengths."""
        raise NotImplementedError

    def split_rows(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Split rows of `read` into the fields of `MaskedLMBatch`, int64."""
        tokens, types, positions, ids, weights, rest = np.split(rows, self._field_ends(), axis=1)
        return {
            "tokens": tokens,
            "token_types": types,
            "lengths": rest[:, 0],
            "masked_positions": positions,
            "masked_ids": ids,
            "masked_weights": weights,
            "next_sentence": rest[:, 1],
        }

    def _parts(self, run: np.ndarray, random: np.random.Generator) -> tuple[list[np.ndarray], int]:
        """Return the one or two parts of a sample, and its label: 1 if the second part is wrong, 0 otherwise."""
        first, stop, document = run.tolist()
        if self.settings.pairs is None:
            return [self._tokens(first, stop)], 0
        cut = first + int(random.integers(1, stop - first))
        parts = [self._tokens(first, cut), self._tokens(cut, stop)]
        if random.random() >= 0.5:
            return parts, 0
        if self.settings.pairs == "sop":
            parts.reverse()
        else:
            parts[1] = self._other_document(document, max(1, self.settings.room - len(parts[0])), random)
        return parts, 1

    def _tokens(self, first: int, stop: int) -> np.ndarray:
        """Return the ids of sentences [first, stop)."""
        begin = int(self.indexed.starts(np.asarray(first)))
        return self.indexed.tokens[begin : begin + int(self.indexed.sizes[first:stop].sum())]

    def _other_document(self, document: int, wanted: int, random: np.random.Generator) -> np.ndarray:
        """Return sentences of another document, from a random sentence on, up to about `wanted` tokens."""
        for _ in range(10):  # as in BERT
            run = self.runs[int(random.integers(len(self.runs)))]
            if run[2] != document:
                break
        else:  # most runs are of this document: choose among the others, which are before and after its runs
            first_own, stop_own = np.searchsorted(self.runs[:, 2], [document, document + 1])
            number = int(random.integers(len(self.runs) - (stop_own - first_own)))
            run = self.runs[number if number < first_own else number + stop_own - first_own]
        first, stop, _ = run.tolist()
        begin = first + int(random.integers(stop - first))
        ends = np.cumsum(self.indexed.sizes[begin:stop])
        return self._tokens(begin, begin + 1 + int(np.searchsorted(ends[:-1], wanted)))


def shorten(parts: list[np.ndarray], room: int, random: np.random.Generator) -> None:
    """Cut parts in place, so that together they have at most `room` tokens.

    Tokens are removed from the longer part until both have the same length, and then from both. Each of them is removed
    at the front or at the end with the same probability.
    """
    sizes = [len(part) for part in parts]
    if sum(sizes) <= room:
        return
    if len(parts) == 1:
        kept = [room]
    else:
        smaller = min(*sizes, room // 2)
        kept = [room - smaller, smaller]
        if sizes[0] < sizes[1]:
            kept.reverse()
    for number, part in enumerate(parts):
        front = int(random.binomial(len(part) - kept[number], 0.5))
        parts[number] = part[front : front + kept[number]]
