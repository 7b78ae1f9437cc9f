"""Length of an epoch: the samples of all training documents. No torch: a dry run imports this."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from neox.config.sections.data import DataConfig
from neox.data.gpt_dataset import split_documents
from neox.data.indexed_dataset import IndexedDataset


def samples_of_epochs(data: DataConfig, seq_length: int, epochs: float) -> int:
    """Count the samples of so many passes over the training documents, as `GPTDataset` cuts them.

    An epoch of a blend is one of all its datasets together, whatever their weights.

    Args:
        data: Data section of the configuration.
        seq_length: Tokens of a sample's input.
        epochs: Passes, also a fraction.

    Raises:
        DataError: If token files are missing or damaged.
    """
    if data.train_data_paths is not None:
        return sum(_samples(_tokens(prefix, data), seq_length, epochs) for prefix in data.train_data_paths)
    return _samples(_tokens(data.data_path, data), seq_length, epochs) if data.data_path is not None else 0


def _tokens(prefix: str, data: DataConfig) -> int:
    """Return the tokens of a dataset's training documents."""
    indexed = IndexedDataset(prefix, data.data_impl)
    if data.train_data_paths is not None:
        return indexed.num_tokens
    documents = split_documents(data.split, len(indexed))[0]
    return int(indexed.sizes[documents.start : documents.stop].sum(dtype=np.int64))


def _samples(tokens: int, seq_length: int, epochs: float) -> int:
    # One token more than a multiple of the length; in whole numbers, so that 3 x 0.1 epochs are what they look like.
    return max(0, math.floor(Fraction(str(epochs)) * tokens) - 1) // seq_length
