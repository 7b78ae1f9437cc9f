"""Which tokens make which sample: gpt-neox's document, sample and shuffle maps, the same arrays, built without loops.

The documents of all epochs are shuffled into one order and laid end to end; sample i is the `seq_length + 1` tokens
from token i * seq_length of that stream on (neighbours share one token); the samples are then shuffled again. Both
shuffles come from one `numpy.random.RandomState(seed)`, documents first. (Megatron-LM's scheme, as in gpt-neox
v2.0 and later.)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from neox.errors import DataError

_FORMAT = "neox index maps 1"


@dataclass(frozen=True)
class IndexMaps:
    """document_map: int32 [epochs * documents], sequence numbers in training order.
    sample_map: int32 or int64 [samples + 1, 2]: entry in document_map and offset in it where each sample begins; sample
        i ends with the token at which sample i + 1 begins.
    shuffle_map: uint32 or int64 [samples].
    """

    document_map: np.ndarray
    sample_map: np.ndarray
    shuffle_map: np.ndarray


def content_key(sizes: np.ndarray, documents: range, *, num_samples: int, seq_length: int, seed: int) -> str:
    """A hash of all that the maps depend on: the documents' lengths and every parameter."""
    digest = hashlib.sha256(f"{_FORMAT} {documents} {num_samples} {seq_length} {seed} {sizes.dtype}\n".encode())
    digest.update(np.ascontiguousarray(sizes[documents.start : documents.stop]).data)
    return digest.hexdigest()[:32]


def count_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """The fewest passes over the documents that give `num_samples` samples."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def build_index_maps(sizes: np.ndarray, documents: range, *, num_samples: int, seq_length: int, seed: int) -> IndexMaps:
    """Build the maps for at least `num_samples` samples of `documents` (sequence numbers into `sizes`).

    Raises DataError when the documents hold no token.
    """
    sizes = np.asarray(sizes[documents.start : documents.stop])
    tokens_per_epoch = int(sizes.sum(dtype=np.int64))
    if tokens_per_epoch == 0:
        raise DataError(f"documents {documents.start} to {documents.stop} hold no tokens; there is nothing to train on")
    epochs = count_epochs(tokens_per_epoch, seq_length, num_samples)
    random = np.random.RandomState(seed)
    order = _shuffled_documents(len(documents), epochs, random)
    samples = (epochs * tokens_per_epoch - 1) // seq_length
    sample_map = _sample_map(sizes[order], seq_length, samples)
    document_map = order.astype(np.int32)
    document_map += documents.start
    return IndexMaps(document_map, sample_map, _shuffled_samples(samples, random))


def _shuffled_documents(documents: int, epochs: int, random: np.random.RandomState) -> np.ndarray:
    """Positions [0, documents) of every epoch in one random order, int64.

    numpy shuffles elements of the machine's word size by a faster loop than others, with the same result.
    """
    order = np.tile(np.arange(documents, dtype=np.intp), epochs)
    random.shuffle(order)
    return order


def _sample_map(stream_sizes: np.ndarray, seq_length: int, samples: int) -> np.ndarray:
    """Where every seq_length-th token of the stream lies: the document that ends after it, and the offset there."""
    ends = np.cumsum(stream_sizes, dtype=np.int64)
    tokens = np.arange(samples + 1, dtype=np.int64) * seq_length
    entries = np.searchsorted(ends, tokens, side="right")
    entries[0] = 0  # gpt-neox begins at the first document even when it is empty
    narrow = 2 * (samples + 1) < np.iinfo(np.int32).max and len(ends) <= np.iinfo(np.int32).max
    result = np.empty((samples + 1, 2), dtype=np.int32 if narrow else np.int64)
    result[:, 0] = entries
    result[:, 1] = tokens - (ends[entries] - stream_sizes[entries])
    result[0, 1] = 0
    return result


def _shuffled_samples(samples: int, random: np.random.RandomState) -> np.ndarray:
    order = np.arange(samples, dtype=np.intp)
    random.shuffle(order)
    return order.astype(np.uint32) if samples < np.iinfo(np.uint32).max - 1 else order
