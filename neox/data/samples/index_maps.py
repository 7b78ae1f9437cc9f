"""Index maps from samples to tokens, and their cache on disk.

The maps are those of Megatron-LM and gpt-neox. The documents of all epochs are shuffled and joined to one stream.
Sample i is the `seq_length + 1` tokens of the stream from token i * seq_length on, so neighbours share one token. Then
the samples are shuffled. Both shuffles use one `numpy.random.RandomState(seed)`, first for the documents.

numpy shuffles elements of the machine's word size faster than smaller ones, and in the same order. Therefore words are
shuffled here, and converted to a smaller type afterwards.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neox.errors import DataError
from neox.files import atomic_directory, lock_file
from neox.log import get_logger

_log = get_logger(__name__)
_FORMAT = "neox index maps 1"
_PIECE = 1 << 16

Arrays = Mapping[str, np.ndarray]


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
    sizes: np.ndarray, documents: range, *, num_samples: int, seq_length: int, seed: int, packing: bytes = b""
) -> str:
    """Return a hash of everything that determines the maps: the lengths of documents, all parameters, and `packing`."""
    digest = hashlib.sha256(f"{_FORMAT} {documents} {num_samples} {seq_length} {seed} {sizes.dtype}\n".encode())
    digest.update(np.ascontiguousarray(sizes[documents.start : documents.stop]).data)
    digest.update(packing)
    return digest.hexdigest()[:32]


def count_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """Return the smallest number of passes over the documents that give `num_samples` samples."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def build_index_maps(sizes: np.ndarray, documents: range, *, num_samples: int, seq_length: int, seed: int) -> IndexMaps:
    """Build the index maps.

    Args:
        sizes: Number of tokens of every sequence of the dataset [sequences].
        documents: Numbers of the sequences to use.
        num_samples: Smallest number of samples. It determines the number of epochs.
        seq_length: Number of tokens of a sample's input.
        seed: Seed of both shuffles.

    Raises:
        DataError: If the documents hold no token.
    """
    sizes = np.asarray(sizes[documents.start : documents.stop])
    tokens_per_epoch = int(sizes.sum(dtype=np.int64))
    if tokens_per_epoch == 0:
        raise DataError(f"documents {documents.start} to {documents.stop} hold no tokens; there is nothing to train on")
    epochs = count_epochs(tokens_per_epoch, seq_length, num_samples)
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


def load_or_build(
    cache_dir: str | Path | None, key: str, names: tuple[str, ...], build: Callable[[], Arrays]
) -> Arrays:
    """Return memory-mapped arrays from the cache. If they are not there, one process builds them and the others wait.

    Args:
        cache_dir: Directory of the cache. None builds the arrays in memory. If the directory cannot be written, they
            are built in memory too, with a warning.
        key: Hash of everything that determines the arrays. It is the name of their entry.
        names: Names of the arrays.
        build: Function that builds the arrays.
    """
    if cache_dir is None:
        return build()
    entry = Path(cache_dir) / key
    arrays = _load(entry, names)
    if arrays is not None:
        return arrays
    built: Arrays | None = None
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with open(entry.with_suffix(".lock"), "a") as file:
            is_locked = lock_file(file, wait=True)  # on a file system without locks, each process builds the arrays
            arrays = _load(entry, names)  # another process may have built them while this one waited
            if arrays is not None:
                return arrays
            built = build()
            if is_locked:
                _remove_leftovers(entry)
            _save(entry, built)
    except OSError as error:
        _log.warning("index maps cannot be written to %s (%s): they stay in memory", cache_dir, error.strerror or error)
        return built or build()
    return _load(entry, names) or built


def _load(entry: Path, names: tuple[str, ...]) -> Arrays | None:
    """Return the memory-mapped arrays of an entry; None if there is no complete entry."""
    if not entry.is_dir():
        return None
    arrays = {}
    try:
        for name in names:
            mapped = np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            arrays[name] = np.asarray(mapped)  # plain arrays are faster to index than `np.memmap`
        return arrays
    except (OSError, ValueError, EOFError) as error:
        _log.warning("index maps in %s are damaged (%s): building them again", entry, error)
        return None


def _remove_leftovers(entry: Path) -> None:
    """Remove what killed processes left of an entry. No other process may be writing the entry."""
    for suffix in ("partial", "old"):
        for leftover in entry.parent.glob(f"{entry.name}.*.{suffix}"):
            shutil.rmtree(leftover, ignore_errors=True)


def _save(entry: Path, arrays: Arrays) -> None:
    """Write an entry, or replace a damaged one. It appears only when it is complete."""
    try:
        with atomic_directory(entry) as partial:
            for name, array in arrays.items():
                np.save(partial / f"{name}.npy", array, allow_pickle=False)
    except OSError as error:
        # Another machine may have written the same arrays in the meantime.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
