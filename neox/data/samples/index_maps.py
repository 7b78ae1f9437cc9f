"""Index maps from samples to tokens, in gpt-neox's order.

The maps are those of Megatron-LM and gpt-neox. The documents of all epochs are shuffled and joined to one stream.
Sample i is the `seq_length + 1` tokens of the stream from token i * seq_length on, so neighbours share one token. Then
the samples are shuffled. Both shuffles use one `numpy.random.RandomState(seed)`, first for the documents.

numpy shuffles elements of the machine's word size faster than smaller ones, and in the same order. Therefore words are
shuffled here, and converted to a smaller type afterwards.
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
    """Maps from a sample to its tokens.

    Attributes:
        document_map: Numbers of the sequences in training order, int32 [epochs * documents].
        sample_map: First token of each sample, as its entry in `document_map` and its offset in that document, int32 or
            int64 [samples + 1, 2]. The last token of sample i is the first token of sample i + 1.
        shuffle_map: Numbers of the samples in training order, uint32 or int64 [samples].
    """

    document_map: np.ndarray
    sample_map: np.ndarray
    shuffle_map: np.ndarray


def content_key(
    sizes: np.ndarray, documents: range, *, num_samples: int | None, seq_length: int, seed: int, packing: bytes = b""
) -> str:
    """Return a hash of everything that determines the maps: the lengths of documents, all parameters, and `packing`."""
    digest = hashlib.sha256(f"{_FORMAT} {documents} {num_samples} {seq_length} {seed} {sizes.dtype}\n".encode())
    digest.update(np.ascontiguousarray(sizes[documents.start : documents.stop]).data)
    digest.update(packing)
    return digest.hexdigest()[:32]


def count_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """Return the smallest number of passes over the documents that give `num_samples` samples."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def build_index_maps(
    sizes: np.ndarray, documents: range, *, num_samples: int | None, seq_length: int, seed: int
) -> IndexMaps:
    """Build the index maps.

    Args:
        sizes: Number of tokens of every sequence of the dataset [sequences].
        documents: Numbers of the sequences to use.
        num_samples: Smallest number of samples. It determines the number of epochs; None is one epoch.
        seq_length: Number of tokens of a sample's input.
        seed: Seed of both shuffles.

    Raises:
        DataError: If the documents hold no token.
    """
    sizes = np.asarray(sizes[documents.start : documents.stop])
    tokens_per_epoch = int(sizes.sum(dtype=np.int64))
    if tokens_per_epoch == 0:
        raise DataError(f"documents {documents.start} to {documents.stop} hold no tokens; there is nothing to train on")
    epochs = count_epochs(tokens_per_epoch, seq_length, num_samples or 0)
    samples = (epochs * tokens_per_epoch - 1) // seq_length
    random = np.random.RandomState(seed)
    stream = _shuffled_documents(sizes, documents, epochs, random)
    return IndexMaps(stream[:, 0].copy(), _sample_map(stream[:, 1], seq_length, samples), shuffled(samples, random))


def _shuffled_documents(sizes: np.ndarray, documents: range, epochs: int, random: np.random.RandomState) -> np.ndarray:
    """Shuffle the documents of all epochs.

    Number and size of a document are stored in one machine word and shuffled together. Otherwise sizes would have to be
    looked up in random order afterwards, which is slow.

    Returns:
        Sequence number and size of each document, int32 [epochs * documents, 2].
    """
    epoch = np.empty((epochs, len(documents), 2), dtype=np.int32)
    epoch[..., 0] = np.arange(documents.start, documents.stop, dtype=np.int32)
    epoch[..., 1] = sizes
    stream = epoch.reshape(-1, 2)
    random.shuffle(stream.view(np.int64)[:, 0])
    return stream


def _sample_map(stream_sizes: np.ndarray, seq_length: int, samples: int) -> np.ndarray:
    """Locate every seq_length-th token of the stream.

    The entry of its document is the number of documents that end at or before the token. This number is counted for all
    tokens of a piece of the stream at once. A piece fits a core's cache.

    Args:
        stream_sizes: Sizes of the documents in the order of the stream.
        seq_length: Number of tokens of a sample's input.
        samples: Number of samples.

    Returns:
        Entry and offset in the document of the first token of each sample, and of the end [samples + 1, 2].
    """
    limit = np.iinfo(np.int32).max
    fits_int32 = 2 * (samples + 1) < limit and len(stream_sizes) < limit
    result = np.empty((samples + 1, 2), dtype=np.int32 if fits_int32 else np.int64)
    tokens = 0  # in the stream up to this piece
    done = 0  # rows of the result
    for first in range(0, len(stream_sizes), _PIECE):
        sizes = stream_sizes[first : first + _PIECE]
        ends = np.cumsum(sizes, dtype=np.int64)
        ends += tokens
        tokens = int(ends[-1])
        stop = min(samples + 1, -(-tokens // seq_length))
        if stop <= done:
            continue
        # For each document of the piece, the first sample (counted from `done`) that does not start before its end.
        following = (ends + (seq_length - 1)) // seq_length - done
        entries = np.cumsum(np.bincount(following, minlength=stop - done)[: stop - done])
        starts = np.arange(done, stop, dtype=np.int64) * seq_length
        result[done:stop, 0] = entries + first
        result[done:stop, 1] = starts - ends[entries] + sizes[entries]
        done = stop
    assert done == samples + 1
    result[0] = 0  # gpt-neox starts at the first document even if it is empty
    return result


def shuffled(samples: int, random: np.random.RandomState) -> np.ndarray:
    """Return the numbers [0, samples) in random order, uint32 or int64 [samples]."""
    order = np.arange(samples, dtype=np.intp)
    random.shuffle(order)
    if samples < np.iinfo(np.uint32).max - 1:
        return order.astype(np.uint32)
    return order
