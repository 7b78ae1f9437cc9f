"""Which tokens make which sample: gpt-neox's document, sample and shuffle maps, the same arrays, built without loops.

The documents of all epochs are shuffled into one order and laid end to end; sample i is the `seq_length + 1` tokens
from token i * seq_length of that stream on (neighbours share one token); the samples are then shuffled again. Both
shuffles come from one `numpy.random.RandomState(seed)`, documents first. (Megatron-LM's scheme, as in gpt-neox
v2.0 and later.)

numpy shuffles elements of the machine's word size by a faster loop than narrower ones, in the same order: so words are
shuffled here, and narrowed afterwards.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from neox.errors import DataError

_FORMAT = "neox index maps 1"
_PIECE = 1 << 16


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
    samples = (epochs * tokens_per_epoch - 1) // seq_length
    random = np.random.RandomState(seed)
    stream = _shuffled_documents(sizes, documents, epochs, random)
    return IndexMaps(stream[:, 0].copy(), _sample_map(stream[:, 1], seq_length, samples), _shuffled(samples, random))


def _shuffled_documents(sizes: np.ndarray, documents: range, epochs: int, random: np.random.RandomState) -> np.ndarray:
    """The documents of every epoch in one random order, int32 [epochs * documents, 2]: sequence number and size.

    Both travel in one machine word, so that sizes need not be looked up in random order afterwards.
    """
    stream = np.empty((epochs, len(documents), 2), dtype=np.int32)
    stream[..., 0] = np.arange(documents.start, documents.stop, dtype=np.int32)
    stream[..., 1] = sizes
    stream = stream.reshape(-1, 2)
    random.shuffle(stream.view(np.int64)[:, 0])
    return stream


def _sample_map(stream_sizes: np.ndarray, seq_length: int, samples: int) -> np.ndarray:
    """Where every seq_length-th token of the stream lies: the document that ends after it, and the offset there.

    That document's entry is the number of documents that end at or before the token, counted for all tokens of a piece
    of the stream at once; pieces fit a core's cache.
    """
    narrow = 2 * (samples + 1) < np.iinfo(np.int32).max and len(stream_sizes) < np.iinfo(np.int32).max
    result = np.empty((samples + 1, 2), dtype=np.int32 if narrow else np.int64)
    tokens = done = 0  # of the stream before this piece; sample starts written
    for first in range(0, len(stream_sizes), _PIECE):
        sizes = stream_sizes[first : first + _PIECE]
        ends = np.cumsum(sizes, dtype=np.int64)
        ends += tokens
        tokens = int(ends[-1])
        stop = min(samples + 1, -(-tokens // seq_length))
        if stop <= done:
            continue
        not_before = (
            ends + (seq_length - 1)
        ) // seq_length - done  # of these sample starts, the first not before an end
        entries = np.cumsum(np.bincount(not_before, minlength=stop - done)[: stop - done])
        starts = np.arange(done, stop, dtype=np.int64) * seq_length
        result[done:stop, 0] = entries + first
        result[done:stop, 1] = starts - ends[entries] + sizes[entries]
        done = stop
    assert done == samples + 1
    result[0] = 0  # gpt-neox begins at the first document even when it is empty
    return result


def _shuffled(samples: int, random: np.random.RandomState) -> np.ndarray:
    """Numbers [0, samples) in random order."""
    order = np.arange(samples, dtype=np.intp)
    random.shuffle(order)
    return order.astype(np.uint32) if samples < np.iinfo(np.uint32).max - 1 else order
