"""Index maps from samples to tokens, and their cache on disk.

The maps are those of Megatron-LM and gpt-neox. The documents of all epochs are shuffled and concatenated to one stream;
sample i is the `seq_length + 1` tokens of the stream from token i * seq_length on, so that neighbours share one token;
then the samples are shuffled. Both shuffles come from one `numpy.random.RandomState(seed)`, documents first.

numpy shuffles elements of the machine's word size faster than narrower ones, in the same order: words are shuffled
here, and narrowed afterwards.
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
        document_map: Sequence numbers in training order, int32 [epochs * documents].
        sample_map: Entry in `document_map` and token offset in that document where each sample begins, int32 or int64
            [samples + 1, 2]. Sample i ends with the first token of sample i + 1.
        shuffle_map: Samples in training order, uint32 or int64 [samples].
    """

    document_map: np.ndarray
    sample_map: np.ndarray
    shuffle_map: np.ndarray


def content_key(
    sizes: np.ndarray, documents: range, *, num_samples: int, seq_length: int, seed: int, packing: bytes = b""
) -> str:
    """Return a hash of everything the maps depend on: the documents' lengths, every parameter, and `packing`."""
    digest = hashlib.sha256(f"{_FORMAT} {documents} {num_samples} {seq_length} {seed} {sizes.dtype}\n".encode())
    digest.update(np.ascontiguousarray(sizes[documents.start : documents.stop]).data)
    digest.update(packing)
    return digest.hexdigest()[:32]


def count_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """Return the fewest passes over the documents that give `num_samples` samples."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def build_index_maps(sizes: np.ndarray, documents: range, *, num_samples: int, seq_length: int, seed: int) -> IndexMaps:
    """Build the index maps.

    Args:
        sizes: Tokens of every sequence of the dataset.
        documents: Sequences to use.
        num_samples: Samples that are needed at least; determines the number of epochs.
        seq_length: Tokens of a sample's input.
        seed: Of both shuffles.

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
    """Shuffle the documents of all epochs: sequence number and size, int32 [epochs * documents, 2].

    Both are in one machine word, so that sizes need not be looked up in random order afterwards.
    """
    epoch = np.empty((epochs, len(documents), 2), dtype=np.int32)
    epoch[..., 0] = np.arange(documents.start, documents.stop, dtype=np.int32)
    epoch[..., 1] = sizes
    stream = epoch.reshape(-1, 2)
    random.shuffle(stream.view(np.int64)[:, 0])
    return stream


def _sample_map(stream_sizes: np.ndarray, seq_length: int, samples: int) -> np.ndarray:
    """Locate every seq_length-th token of the stream: entry of its document, and offset in that document.

    The entry is the number of documents that end at or before the token. It is counted for all tokens of a piece of the
    stream at once; pieces fit a core's cache.
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
        # For each document of the piece, the first of these sample starts that is not before its end.
        following = (ends + (seq_length - 1)) // seq_length - done
        entries = np.cumsum(np.bincount(following, minlength=stop - done)[: stop - done])
        starts = np.arange(done, stop, dtype=np.int64) * seq_length
        result[done:stop, 0] = entries + first
        result[done:stop, 1] = starts - ends[entries] + sizes[entries]
        done = stop
    assert done == samples + 1
    result[0] = 0  # gpt-neox begins at the first document even if it is empty
    return result


def shuffled(samples: int, random: np.random.RandomState) -> np.ndarray:
    """Shuffle the numbers [0, samples): uint32 or int64 [samples]."""
    order = np.arange(samples, dtype=np.intp)
    random.shuffle(order)
    return order.astype(np.uint32) if samples < np.iinfo(np.uint32).max - 1 else order


def load_or_build(
    cache_dir: str | Path | None, key: str, names: tuple[str, ...], build: Callable[[], Arrays]
) -> Arrays:
    """Return memory-mapped arrays from the cache; the first process of a node builds them while the others wait.

    Args:
        cache_dir: Directory of the cache. None builds in memory; so does a directory that cannot be written, with a
            warning.
        key: Hash of everything the arrays depend on.
        names: Names of the arrays.
        build: Called where the cache has no entry `key`.
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
            alone = lock_file(file, wait=True)  # without locks, each process builds the same arrays
            arrays = _load(entry, names)  # another process may have built them while this one waited
            if arrays is not None:
                return arrays
            built = build()
            _save(entry, built, remove_leftovers=alone)
    except OSError as error:
        _log.warning("index maps cannot be written to %s (%s): they stay in memory", cache_dir, error.strerror or error)
        return built or build()
    return _load(entry, names) or built


def _load(entry: Path, names: tuple[str, ...]) -> Arrays | None:
    """Map a complete entry; None if there is none."""
    if not entry.is_dir():
        return None
    try:
        maps = {name: np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
        return {name: np.asarray(array) for name, array in maps.items()}  # as plain arrays, which are faster to index
    except (OSError, ValueError, EOFError) as error:
        _log.warning("index maps in %s are damaged (%s): building them again", entry, error)
        return None


def _save(entry: Path, arrays: Arrays, *, remove_leftovers: bool) -> None:
    """Write an entry atomically, replacing a damaged one.

    Args:
        entry: Directory of the entry.
        arrays: Arrays by name.
        remove_leftovers: Whether to remove what killed processes left; only while no other process writes.
    """
    for kind in ("partial", "old") if remove_leftovers else ():
        for leftover in entry.parent.glob(f"{entry.name}.*.{kind}"):
            shutil.rmtree(leftover, ignore_errors=True)
    try:
        with atomic_directory(entry) as partial:
            for name, array in arrays.items():
                np.save(partial / f"{name}.npy", array, allow_pickle=False)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another node was first, with the same arrays
            raise
