"""Amounts of one or more passes over the data: samples, rows, tokens, padding, and what is cut.

A dry run and the shares of a blend need them before any index map is built. No torch is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from neox.config import NeoXConfig
from neox.config.sections.data import DataConfig, PackImpl
from neox.config.sections.preferences import SplitAnswers
from neox.data.answer_pairs.answers import AnswerPairs, open_pairs
from neox.data.answer_pairs.pair_rows import rows_of_passes, usable_pairs
from neox.data.samples.gpt_dataset import split_documents
from neox.data.samples.packing import DocumentPieces, packed, predicted_tokens, read_tokens, usable_documents
from neox.data.token_files.indexed_dataset import IndexedDataset

COUNTED_DOCUMENTS = 1 << 17
"""Number of documents that are packed to estimate the samples of a pass, which takes a fraction of a second."""


def training_samples(config: NeoXConfig, seq_length: int, epochs: float) -> int:
    """Return the number of samples, or of rows of pairs, in a number of epochs of the training data.

    Args:
        config: The configuration.
        seq_length: Number of tokens of a sample's input.
        epochs: Number of epochs, which may be a fraction.

    Raises:
        DataError: If token files are missing or damaged.
    """
    if config.preferences.on_preferences:
        return rows_of_epochs(config, seq_length, epochs)
    return samples_of_epochs(config.data, seq_length, epochs)


def samples_of_epochs(data: DataConfig, seq_length: int, epochs: float) -> int:
    """Return the number of samples that `GPTDataset` makes in a number of passes over the training documents.

    An epoch of a blend is one pass over each of its datasets, whatever their weights. With `pack_until_overflow` the
    number depends on the order of documents; here it is the order of the files.

    Args:
        data: Data section of the configuration.
        seq_length: Number of tokens of a sample's input.
        epochs: Number of passes, which may be a fraction.

    Raises:
        DataError: If token files are missing or damaged.
    """
    if data.train_data_paths:
        labels: Sequence[str | None] = data.train_label_data_paths or [None] * len(data.train_data_paths)
        samples = 0
        for prefix, label in zip(data.train_data_paths, labels, strict=True):
            indexed = IndexedDataset(prefix, data.data_impl)
            samples += _samples(indexed, range(len(indexed)), label, data, seq_length, epochs)
        return samples
    if data.data_path is not None:
        indexed = IndexedDataset(data.data_path, data.data_impl)
        documents = split_documents(data.split, len(indexed))[0]
        return _samples(indexed, documents, None, data, seq_length, epochs)
    return 0


def samples_of_set(
    prefix: str, labels: str | None, data: DataConfig, seq_length: int, *, split: int | None = None
) -> int | None:
    """Return the number of samples of one pass over an evaluation's documents.

    Args:
        prefix: Prefix of the token files.
        labels: Prefix of those of the labels, if any.
        data: Data section of the configuration.
        seq_length: Number of tokens of a sample's input.
        split: Number of the part of `split` whose documents are meant; None for all documents.

    Returns:
        The samples; None if too many documents would have to be packed to count them.

    Raises:
        DataError: If token files are missing or damaged.
    """
    indexed = IndexedDataset(prefix, data.data_impl)
    documents = range(len(indexed)) if split is None else split_documents(data.split, len(indexed))[split]
    if data.pack_impl != "packed" and len(documents) > COUNTED_DOCUMENTS:
        return None
    return _samples(indexed, documents, labels, data, seq_length, 1) if documents else 0


def usable_answers(config: NeoXConfig, answers: SplitAnswers, seq_length: int) -> tuple[AnswerPairs, np.ndarray]:
    """Return the pairs of answers of a split, and the numbers of those that can be trained on.

    Raises:
        DataError: If token files are missing, damaged, or hold answers that cannot be trained on.
    """
    open_ids = partial(IndexedDataset, data_impl=config.data.data_impl)
    pairs = open_pairs(answers, seq_length, open_ids, partial(open_ids, floats=True))
    return pairs, usable_pairs(pairs, seq_length, skip_bad=config.preferences.skip_bad_pairs)


def rows_of_epochs(config: NeoXConfig, seq_length: int, epochs: float) -> int:
    """Return the number of rows that hold the answers for training in a number of passes over them.

    Args:
        config: The configuration of a run that learns from preferences.
        seq_length: Number of positions of a row.
        epochs: Number of passes, which may be a fraction.

    Raises:
        DataError: If token files are missing, damaged, or hold answers that cannot be trained on.
    """
    pairs, usable = usable_answers(config, config.preferences.answers(config.data)[0], seq_length)
    whole, part = divmod(Fraction(str(epochs)), 1)
    rows = 0
    in_passes = rows_of_passes(pairs, usable, seq_length, config.training.seed, config.data.pack_impl)
    for rows_of_pass in islice(in_passes, int(whole)):
        rows += len(rows_of_pass)
    return rows + math.floor(part * len(next(in_passes)))


def _samples(
    indexed: IndexedDataset, documents: range, labels: str | None, data: DataConfig, seq_length: int, epochs: float
) -> int:
    """Return the number of samples of documents of one dataset. `labels` is the prefix of their labels."""
    passes = Fraction(str(epochs))  # exact, so that 3 times 0.1 epochs are 0.3 epochs
    sizes = indexed.sizes[documents.start : documents.stop]
    if data.pack_impl == "packed":
        tokens = math.floor(passes * int(sizes.sum(dtype=np.int64)))
        return max(0, tokens - 1) // seq_length  # samples share tokens; only the last one has its last token to itself
    opened_labels = None
    if labels is not None:
        opened_labels = IndexedDataset(labels, data.data_impl)
    usable = usable_documents(
        indexed, opened_labels, documents, seq_length, impl=data.pack_impl, allow_chopped=data.allow_chopped
    )
    return math.floor(passes * samples_of_pass(sizes[usable], data.pack_impl, seq_length))


def tokens_of_part(prefix: str, data: DataConfig, part: int) -> int:
    """Return the number of tokens in the documents of a part of `split`. Raises DataError if files are missing."""
    indexed = IndexedDataset(prefix, data.data_impl)
    documents = split_documents(data.split, len(indexed))[part]
    return int(indexed.sizes[documents.start : documents.stop].sum(dtype=np.int64))


def tokens_of_pass(
    indexed: IndexedDataset, documents: range, labels: IndexedDataset | None, data: DataConfig, seq_length: int
) -> int:
    """Return the number of tokens in the samples of one pass over documents of a dataset, including padding.

    For many documents it is extrapolated from the first ones.

    Args:
        indexed: Token dataset.
        documents: Numbers of the documents.
        labels: Labels of its tokens, if any. Documents without one in their sample are left out.
        data: Data section of the configuration.
        seq_length: Number of tokens of a sample's input.
    """
    if data.pack_impl == "packed":
        return int(indexed.sizes[documents.start : documents.stop].sum(dtype=np.int64))
    return tokens_of_used(read_documents(indexed, documents, labels, data, seq_length).used, data, seq_length)


def tokens_of_used(used: np.ndarray, data: DataConfig, seq_length: int) -> int:
    """Return what `tokens_of_pass` does, of the numbers of tokens of the documents that padded samples use."""
    counted = used if data.pack_impl == "unpacked" else used[:COUNTED_DOCUMENTS]
    if not len(counted):
        return 0
    samples = samples_of_pass(counted, data.pack_impl, seq_length)
    return round(samples * len(used) / len(counted)) * seq_length


@dataclass(frozen=True)
class Truncation:
    """What samples leave out of a dataset's documents.

    Attributes:
        documents: Number of documents.
        cut: Number of documents that lose their end.
        dropped: Number of documents that are in no sample.
        trained: Number of tokens that would be predicted if all documents were whole.
        lost: Number of those that no sample predicts.
    """

    documents: int
    cut: int
    dropped: int
    trained: int
    lost: int

    @property
    def lost_share(self) -> float:
        """Share of the predicted tokens that is lost."""
        return self.lost / self.trained if self.trained else 0.0


@dataclass(frozen=True)
class ReadDocuments:
    """What padded samples read of documents.

    Attributes:
        sizes: Number of tokens of each document [documents].
        in_all: Number of tokens to predict in each document [documents].
        in_samples: Number of those that samples predict if the document is in one [documents].
        usable: Whether each document can be in a sample [documents].
        width: Number of tokens of a sample.
    """

    sizes: np.ndarray
    in_all: np.ndarray
    in_samples: np.ndarray
    usable: np.ndarray
    width: int

    @property
    def used(self) -> np.ndarray:
        """Numbers of tokens of the documents that samples use."""
        return self.sizes[self.usable]

    def truncation(self) -> Truncation:
        """Return what `pack_until_overflow` and `unpacked` leave out."""
        trained = int(self.in_all.sum())
        cut = int((self.usable & (self.sizes > self.width)).sum())
        lost = trained - int(self.in_samples[self.usable].sum())
        return Truncation(len(self.sizes), cut, int((~self.usable).sum()), trained, lost)


def read_documents(
    indexed: IndexedDataset, documents: range, labels: IndexedDataset | None, data: DataConfig, seq_length: int
) -> ReadDocuments:
    """Return what padded samples read of documents. Labels are read once. Arguments as for `tokens_of_pass`."""
    sizes = np.asarray(indexed.sizes[documents.start : documents.stop], dtype=np.int64)
    read = read_tokens(sizes, data.pack_impl, seq_length)
    if labels is None:
        in_all = np.maximum(sizes - 1, 0)
        in_samples = np.minimum(in_all, read)
    else:
        longest = max(read, int(sizes.max(initial=0)))
        in_all, in_samples = predicted_tokens(labels, [longest, read])[:, documents.start : documents.stop]
    usable = (sizes > 1) & (in_samples > 0)
    if not data.allow_chopped:
        usable &= sizes <= seq_length + 1
    return ReadDocuments(sizes, in_all, in_samples, usable, seq_length + 1)


def samples_of_pass(sizes: np.ndarray, impl: PackImpl, seq_length: int) -> int:
    """Return the number of padded samples that usable documents of given sizes make, in the given order."""
    if impl == "best_fit":
        return _samples_of_pieces(sizes, seq_length)
    if impl == "unpacked":
        return len(sizes)
    samples = 0
    room = 0  # in the last sample
    for size in sizes.tolist():
        if not samples or size > room:
            samples += 1
            room = seq_length + 1
        room -= size
    return samples


def _samples_of_pieces(sizes: np.ndarray, seq_length: int) -> int:
    """Return the number of samples that `best_fit` makes of documents of two tokens or more, in the given order."""
    pieces = DocumentPieces.of(sizes, sizes > 1, range(len(sizes)), seq_length)
    order = np.arange(len(pieces))
    return sum(1 for _ in packed(order, pieces.lengths(order), pieces.width))


class PackingShares(NamedTuple):
    """What a packing wastes.

    Attributes:
        padding: Share of the positions of samples that are padding.
        cut: Share of the documents that are cut.
    """

    padding: float
    cut: float


def packing_shares(sizes: np.ndarray, impl: PackImpl, seq_length: int) -> PackingShares:
    """Return what padded samples of documents of given sizes waste, by the first documents if there are many.

    Args:
        sizes: Numbers of tokens of the documents that are used (`ReadDocuments.used`).
        impl: How they are packed; not `packed`, which has no padding.
        seq_length: Number of tokens of a sample's input.
    """
    counted = sizes[:COUNTED_DOCUMENTS]
    if not len(counted):
        return PackingShares(0.0, 0.0)
    if impl == "best_fit":
        pieces = DocumentPieces.of(counted, counted > 1, range(len(counted)), seq_length)
        filled = int(pieces.lengths(np.arange(len(pieces))).sum())
    else:
        filled = int(np.minimum(counted, seq_length + 1).sum(dtype=np.int64))
    positions = samples_of_pass(counted, impl, seq_length) * (seq_length + 1)
    return PackingShares(1.0 - filled / positions, float((counted > seq_length + 1).mean()))
