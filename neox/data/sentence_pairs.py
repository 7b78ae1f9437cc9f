"""Samples of pairs of sentences for masked language modelling (arXiv:1810.04805, arXiv:1909.11942)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neox.config.sections.data import SentencePairs
from neox.data.index_maps import load_or_build
from neox.data.indexed_dataset import IndexedDataset
from neox.data.masking import MaskingVocabulary, mask_tokens
from neox.errors import DataError

_FORMAT = "neox sentence pairs 1"
_SHORTEST = 2  # tokens of a sample that is shortened at random


@dataclass(frozen=True)
class PairSettings:
    """How sentences become samples.

    Attributes:
        seq_length: S, tokens of a sample, padding included.
        max_predictions: P, most masked tokens of a sample.
        pairs: What the second sentence of half of the samples is: `nsp` another document's, `sop` the first one; None
            makes samples of one run of sentences, without a sentence head.
        mask_share: Share of the tokens that are masked.
        short_share: Share of the samples that are shortened to a random length.
        whole_words: Whether words are masked as a whole.
    """

    seq_length: int
    max_predictions: int
    pairs: SentencePairs | None
    mask_share: float
    short_share: float
    whole_words: bool

    @property
    def room(self) -> int:
        """Tokens of sentences that fit into a sample."""
        return self.seq_length - (3 if self.pairs else 2)


class SentencePairDataset:
    """Masked samples of the sentences of documents.

    The sentences of a document, one sequence each, are joined until they fill a sample (`short_share` of the samples
    are filled to a random length); such runs of sentences are the samples of a pass. Each pass has its own order, cuts
    the runs into two sentences elsewhere and masks other tokens, all as a function of (seed, number of the sample).
    Where `nsp` takes the second part from another document, the rest of the run is left out in this pass.

    Attributes:
        indexed: The dataset: a sequence is a sentence.
        seq_length: Tokens of a sample.
        num_samples: Number of samples; it does not depend on how many the run reads.
        row_width: Numbers of a row of `read`.
        runs: First sentence, end and document of the samples of one pass, int64 [samples of a pass, 3].
    """

    dtype = np.dtype(np.int64)
    has_labels = False

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        num_samples: int,
        settings: PairSettings,
        vocabulary: MaskingVocabulary,
        seed: int,
        cache_dir: str | Path | None = None,
    ) -> None:
        """Build or load the runs of sentences.

        Args:
            indexed: The dataset.
            documents: Documents to use, with step 1.
            num_samples: Samples that the run reads; determines the number of passes.
            settings: How sentences become samples.
            vocabulary: Special tokens and words.
            seed: Of all draws.
            cache_dir: Directory where runs of sentences and orders are kept; None builds them in memory.

        Raises:
            DataError: If the documents hold no sample.
        """
        if documents.step != 1 or not 0 <= documents.start < documents.stop <= indexed.num_documents:
            raise DataError(
                f"{indexed.prefix} has {indexed.num_documents} documents; {documents} is not a range of them"
            )
        self.indexed, self.settings, self.vocabulary, self.seed = indexed, settings, vocabulary, seed
        self.seq_length = settings.seq_length
        self.row_width = 2 * settings.seq_length + 3 * settings.max_predictions + 2
        self._cache_dir = cache_dir
        starts = np.asarray(indexed.document_index[documents.start : documents.stop + 1])
        self._key = self._content_key(starts)
        built = load_or_build(cache_dir, self._key, ("runs",), lambda: {"runs": self._build_runs(documents, starts)})
        self.runs = built["runs"]
        if not len(self.runs):
            raise DataError(
                f"{indexed.prefix}: documents {documents.start} to {documents.stop} hold no sample: "
                + ("pairs need documents of two sentences and more; " if settings.pairs else "they have no sentences; ")
                + "make the data with tools/preprocess_data.py --split-sentences"
            )
        self._passes = max(1, -(-num_samples // len(self.runs)))
        self.num_samples = self._passes * len(self.runs)
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.num_samples

    def _content_key(self, starts: np.ndarray) -> str:
        """Return a hash of everything the runs depend on."""
        s = self.settings
        text = f"{_FORMAT} {s.room} {bool(s.pairs)} {s.short_share} {self.seed} {len(self.indexed)}\n"
        digest = hashlib.sha256(text.encode())
        digest.update(np.ascontiguousarray(starts).data)
        digest.update(np.ascontiguousarray(self.indexed.sizes[int(starts[0]) : int(starts[-1])]).data)
        return digest.hexdigest()[:32]

    def _build_runs(self, documents: range, starts: np.ndarray) -> np.ndarray:
        """Join the sentences of each document until they fill a sample."""
        least = 2 if self.settings.pairs else 1
        random = np.random.default_rng([self.seed, 0])
        runs: list[tuple[int, int, int]] = []
        for document, (first, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            if stop - first < least:
                continue
            sizes = self.indexed.sizes[first:stop].tolist()
            begin, length, target = first, 0, self._target(random)
            for sentence, size in enumerate(sizes, start=first):
                length += size
                rest = stop - sentence - 1  # sentences that would be left
                if (length >= target and sentence + 1 - begin >= least and (rest == 0 or rest >= least)) or not rest:
                    runs.append((begin, sentence + 1, document + documents.start))
                    begin, length, target = sentence + 1, 0, self._target(random)
        return np.asarray(runs, dtype=np.int64).reshape(-1, 3)

    def _target(self, random: np.random.Generator) -> int:
        """Return the length to which the next sample is filled."""
        room = self.settings.room
        return int(random.integers(_SHORTEST, room + 1)) if random.random() < self.settings.short_share else room

    def _order(self, number: int) -> np.ndarray:
        """Return the order of the runs in a pass; the last two are kept."""
        if number not in self._orders:
            build = np.random.default_rng([self.seed, 1, number]).permutation
            key = hashlib.sha256(f"{self._key} {number}".encode()).hexdigest()[:32]
            total = len(self.runs)
            found = load_or_build(self._cache_dir, key, ("order",), lambda: {"order": build(total).astype(np.uint32)})
            self._orders = {**dict(list(self._orders.items())[-1:]), number: found["order"]}
        return self._orders[number]

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return samples as rows, int64 [len(indices), row_width]; `split_rows` takes them apart."""
        return np.stack([self._row(int(index)) for index in indices])

    def _row(self, index: int) -> np.ndarray:
        """Return one sample: tokens [S], token types [S], positions, ids and weights [P], length, next sentence."""
        number, place = divmod(index, len(self.runs))
        random = np.random.default_rng([self.seed, 2, index])
        run = self.runs[self._order(number)[place]]
        parts, label = self._parts(run, random)
        shorten(parts, self.settings.room, random)
        vocabulary, settings = self.vocabulary, self.settings
        pieces = [np.array([vocabulary.cls], np.int64)]
        for part in parts:
            pieces += [part.astype(np.int64), np.array([vocabulary.sep], np.int64)]
        masked = mask_tokens(
            np.concatenate(pieces),
            vocabulary,
            random,
            share=settings.mask_share,
            most=settings.max_predictions,
            whole_words=settings.whole_words,
        )
        length, found, width = len(masked.tokens), len(masked.positions), settings.max_predictions
        row = np.zeros(self.row_width, np.int64)
        tokens, types, positions, ids, weights, rest = np.split(row, self._edges())
        tokens[:] = vocabulary.pad
        tokens[:length] = masked.tokens
        if len(parts) > 1:
            types[len(parts[0]) + 2 : length] = 1
        assert found <= width
        positions[:found], ids[:found], weights[:found] = masked.positions, masked.ids, 1
        rest[:] = length, label
        return row

    def _edges(self) -> np.ndarray:
        s, p = self.settings.seq_length, self.settings.max_predictions
        return np.cumsum([s, s, p, p, p])

    def read_labels(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Raise NotImplementedError: what is to be predicted stands in the rows."""
        raise NotImplementedError

    def split_rows(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the fields of `MaskedLMBatch` in rows of `read`, by name, int64."""
        tokens, types, positions, ids, weights, rest = np.split(rows, self._edges(), axis=1)
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
        """Return the one or two parts of a sample, and whether the second does not follow the first."""
        first, stop, document = run.tolist()
        if self.settings.pairs is None:
            return [self._tokens(first, stop)], 0
        cut = first + int(random.integers(1, stop - first))
        parts, other = [self._tokens(first, cut), self._tokens(cut, stop)], random.random() < 0.5
        if other and self.settings.pairs == "sop":
            parts.reverse()
        elif other:
            parts[1] = self._other_document(document, max(1, self.settings.room - len(parts[0])), random)
        return parts, int(other)

    def _tokens(self, first: int, stop: int) -> np.ndarray:
        """Return the ids of sentences [first, stop)."""
        begin = int(self.indexed.starts(np.asarray(first)))
        return self.indexed.tokens[begin : begin + int(self.indexed.sizes[first:stop].sum())]

    def _other_document(self, document: int, wanted: int, random: np.random.Generator) -> np.ndarray:
        """Return sentences of another document from a random one on, up to about `wanted` tokens."""
        for _ in range(10):  # as BERT; a corpus of one document has no other
            number = int(random.integers(len(self.runs)))
            if self.runs[number, 2] != document:
                break
        first, stop, _ = self.runs[number].tolist()
        begin = first + int(random.integers(stop - first))
        ends = np.cumsum(self.indexed.sizes[begin:stop])
        return self._tokens(begin, begin + 1 + int(np.searchsorted(ends[:-1], wanted)))


def shorten(parts: list[np.ndarray], room: int, random: np.random.Generator) -> None:
    """Cut parts to `room` tokens together: the longest first, each token from the front or the end at random."""
    sizes = [len(part) for part in parts]
    if sum(sizes) <= room:
        return
    if len(parts) == 1:
        kept = [room]
    else:
        least = min(*sizes, room // 2)
        kept = [least, room - least] if sizes[0] < sizes[1] else [room - least, least]
    for i, (size, keep) in enumerate(zip(sizes, kept, strict=True)):
        front = int(random.binomial(size - keep, 0.5))
        parts[i] = parts[i][front : front + keep]
