"""Number of samples in an epoch, one pass over all training documents. A dry run imports this, so no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from itertools import islice

import numpy as np

from neox.config import NeoXConfig
from neox.config.sections.data import DataConfig
from neox.data.answer_pairs.pair_files import open_pairs
from neox.data.answer_pairs.pair_packing import passes, usable_pairs
from neox.data.samples.gpt_dataset import split_documents
from neox.data.samples.packing import samples_of_pass, usable_documents
from neox.data.token_files.indexed_dataset import IndexedDataset


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


def rows_of_epochs(config: NeoXConfig, seq_length: int, epochs: float) -> int:
    """Return the number of rows that hold the answers for training in a number of passes over them.

    Args:
        config: The configuration of a run that learns from preferences.
        seq_length: Number of positions of a row.
        epochs: Number of passes, which may be a fraction.

    Raises:
        DataError: If token files are missing, damaged, or hold answers that cannot be trained on.
    """
    keys = config.preferences
    open_ids = partial(IndexedDataset, data_impl=config.data.data_impl)
    pairs = open_pairs(keys.answers(config.data)[0], seq_length, open_ids, partial(open_ids, floats=True))
    usable = usable_pairs(pairs, seq_length, skip_bad=keys.skip_bad_pairs)
    whole, part = divmod(Fraction(str(epochs)), 1)
    rows = 0
    of_passes = passes(pairs, usable, seq_length, config.training.seed, config.data.pack_impl)
    for rows_of_pass in islice(of_passes, int(whole)):
        rows += len(rows_of_pass)
    return rows + math.floor(part * len(next(of_passes)))


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
    usable = usable_documents(indexed, opened_labels, documents, seq_length, allow_chopped=data.allow_chopped)
    return math.floor(passes * samples_of_pass(sizes[usable], data.pack_impl, seq_length))
