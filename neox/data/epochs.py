"""Length of an epoch: the samples of all training documents. No torch: a dry run imports this."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from neox.config.sections.data import DataConfig
from neox.data.gpt_dataset import split_documents
from neox.data.indexed_dataset import IndexedDataset
from neox.data.packing import samples_of_pass, usable_documents


def samples_of_epochs(data: DataConfig, seq_length: int, epochs: float) -> int:
    """Count the samples of so many passes over the training documents, as `GPTDataset` cuts them.

    An epoch of a blend is one of all its datasets together, whatever their weights. With `pack_until_overflow` the
    number depends on the order of documents: it is that of the files.

    Args:
        data: Data section of the configuration.
        seq_length: Tokens of a sample's input.
        epochs: Passes, also a fraction.

    Raises:
        DataError: If token files are missing or damaged.
    """
    paths = data.train_data_paths or ((data.data_path,) if data.data_path is not None else ())
    labels = data.train_label_data_paths or (None,) * len(paths)
    return sum(_samples(path, label, data, seq_length, epochs) for path, label in zip(paths, labels, strict=True))


def _samples(prefix: str, labels: str | None, data: DataConfig, seq_length: int, epochs: float) -> int:
    indexed = IndexedDataset(prefix, data.data_impl)
    documents = range(len(indexed)) if data.train_data_paths else split_documents(data.split, len(indexed))[0]
    passes = Fraction(str(epochs))  # in whole numbers, so that 3 x 0.1 epochs are what they look like
    sizes = indexed.sizes[documents.start : documents.stop]
    if data.pack_impl == "packed":  # one token more than a multiple of the length
        return max(0, math.floor(passes * int(sizes.sum(dtype=np.int64))) - 1) // seq_length
    opened = None if labels is None else IndexedDataset(labels, data.data_impl)
    usable = usable_documents(indexed, opened, documents, seq_length, allow_chopped=data.allow_chopped)
    return math.floor(passes * samples_of_pass(sizes[usable], data.pack_impl, seq_length))
