"""Samples of whole documents and padding (`pack_impl: pack_until_overflow` and `unpacked`).

Samples and the documents of each pass are shuffled by the same draws as in later versions of gpt-neox.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neox.config.sections.data import DataConfig, PackImpl
from neox.data.samples.best_fit import samples_of_pieces
from neox.data.samples.index_maps import IndexMaps, shuffled
from neox.data.token_files.indexed_dataset import IndexedDataset
from neox.errors import DataError

_COUNTED_DOCUMENTS = 1 << 17
"""Number of documents that are packed to estimate the samples of a pass, which takes a fraction of a second."""


@dataclass(frozen=True)
class Packing:
    """The way documents become samples.

    Attributes:
        impl: Kind of packing. `packed` joins documents and cuts the result into samples, `pack_until_overflow` fills a
            sample with whole documents until the next one does not fit, and `unpacked` puts one document in a sample.
            `best_fit` is in `neox.data.samples.best_fit`.
        allow_chopped: Whether the end of a document longer than a sample is cut off. Otherwise the document is left
            out.
    """

    impl: PackImpl = "packed"
    allow_chopped: bool = True

    @property
    def is_padded(self) -> bool:
        """Whether samples end in padding."""
        return self.impl != "packed"


def usable_documents(
    indexed: IndexedDataset, labels: IndexedDataset | None, documents: range, seq_length: int, *, allow_chopped: bool
) -> np.ndarray:
    """Return which documents can be in a sample.

    A usable document has a token to predict. If documents may not be cut, it is not longer than a sample.

    Args:
        indexed: Token dataset.
        labels: Labels of its tokens. By default every token is predicted.
        documents: Numbers of the documents to use.
        seq_length: Number of tokens of a sample's input.
        allow_chopped: Whether longer documents are cut.

    Returns:
        Whether each document is usable, bool [documents].

    Raises:
        DataError: If no document is usable.
    """
    sizes = np.asarray(indexed.sizes[documents.start : documents.stop])
    usable = sizes > 1
    if not allow_chopped:
        usable &= sizes <= seq_length + 1
    if labels is not None:
        usable &= _has_predicted_token(labels, seq_length)[documents.start : documents.stop]
    if usable.any():
        return usable
    wanted = "a document with at least two tokens"
    if not allow_chopped:
        wanted += f" and at most seq_length + 1 = {seq_length + 1} (allow_chopped is false)"
    if labels is not None:
        wanted += f", one of which {labels.prefix} does not ignore"
    raise DataError(
        f"{indexed.prefix}: documents {documents.start} to {documents.stop} have no sample, because each needs "
        f"{wanted}; use other data, a longer seq_length or `pack_impl: packed`"
    )


def _has_predicted_token(labels: IndexedDataset, seq_length: int) -> np.ndarray:
    """Return, for each document, whether a sample of it has a token to predict, bool [documents]."""
    return _predicted_tokens(labels, seq_length) > 0


def _predicted_tokens(labels: IndexedDataset, seq_length: int) -> np.ndarray:
    """Return the number of tokens to predict in a sample of each document, int64 [documents].

    These are among the tokens after the first one and up to the end of the sample.
    """
    result = np.empty(len(labels), dtype=np.int64)
    for first, sizes, ids in labels.blocks():
        predicted_before = np.concatenate([[0], np.cumsum(ids >= 0, dtype=np.int64)])  # before each token
        ends = np.cumsum(sizes, dtype=np.int64)
        begins = ends - sizes
        second_tokens = np.minimum(begins + 1, ends)
        sample_ends = np.minimum(begins + seq_length + 1, ends)
        result[first : first + len(sizes)] = predicted_before[sample_ends] - predicted_before[second_tokens]
    return result


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


def truncation(
    indexed: IndexedDataset, labels: IndexedDataset | None, seq_length: int, *, allow_chopped: bool
) -> Truncation:
    """Return what `pack_until_overflow` and `unpacked` leave out of a dataset. Raises DataError if no document is left.

    Args:
        indexed: Token dataset.
        labels: Labels of its tokens. By default every token is predicted.
        seq_length: Number of tokens of a sample's input.
        allow_chopped: Whether longer documents are cut.
    """
    documents = range(len(indexed))
    usable = usable_documents(indexed, labels, documents, seq_length, allow_chopped=allow_chopped)
    sizes = np.asarray(indexed.sizes, dtype=np.int64)
    if labels is None:
        in_all = np.maximum(sizes - 1, 0)
        in_samples = np.minimum(in_all, seq_length)
    else:
        in_all = _predicted_tokens(labels, int(sizes.max()))
        in_samples = _predicted_tokens(labels, seq_length)
    trained = int(in_all.sum())
    cut = int((usable & (sizes > seq_length + 1)).sum())
    return Truncation(len(sizes), cut, int((~usable).sum()), trained, trained - int(in_samples[usable].sum()))


def tokens_of_pass(indexed: IndexedDataset, labels: IndexedDataset | None, data: DataConfig, seq_length: int) -> int:
    """Return the number of tokens in the samples of one pass over a dataset, including padding.

    For many documents it is extrapolated from the first ones.

    Args:
        indexed: Token dataset.
        labels: Labels of its tokens, if any. Documents without one in their sample are left out.
        data: Data section of the configuration.
        seq_length: Number of tokens of a sample's input.
    """
    sizes = np.asarray(indexed.sizes)
    if data.pack_impl == "packed":
        return int(sizes.sum(dtype=np.int64))
    usable = sizes > 1
    read = int(sizes.max(initial=0)) if data.pack_impl == "best_fit" else seq_length
    if not data.allow_chopped:
        usable &= sizes <= seq_length + 1
    if labels is not None:
        usable &= _has_predicted_token(labels, read)
    used = sizes[usable]
    counted = used if data.pack_impl == "unpacked" else used[:_COUNTED_DOCUMENTS]
    if not len(counted):
        return 0
    samples = samples_of_pass(counted, data.pack_impl, seq_length)
    return round(samples * len(used) / len(counted)) * seq_length


def samples_of_pass(sizes: np.ndarray, impl: PackImpl, seq_length: int) -> int:
    """Return the number of padded samples that usable documents of given sizes make, in the given order."""
    if impl == "best_fit":
        return samples_of_pieces(sizes, seq_length)
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


def build_padded_maps(
    sizes: np.ndarray,
    documents: range,
    usable: np.ndarray,
    *,
    impl: PackImpl,
    num_samples: int,
    seq_length: int,
    seed: int,
) -> IndexMaps:
    """Build the index maps of padded samples.

    Sample i consists of the documents `document_map[a:b]` with a = `sample_map[i, 0]` and b = `sample_map[i + 1, 0]`.

    Args:
        sizes: Number of tokens of every sequence of the dataset [sequences].
        documents: Numbers of the sequences to use.
        usable: Which of them are usable, from `usable_documents` [documents].
        impl: `pack_until_overflow` or `unpacked`.
        num_samples: Number of samples that the run reads. So many are made, in several passes if needed.
        seq_length: Number of tokens of a sample's input.
        seed: Seed of the shuffles.
    """
    samples = max(1, num_samples)
    random = np.random.RandomState(seed)
    shuffle_map = shuffled(samples, random)
    if impl == "unpacked":
        entries = np.resize(np.flatnonzero(usable), samples)
        starts = np.arange(samples + 1)
    else:
        own_sizes = np.asarray(sizes[documents.start : documents.stop])
        entries, starts = _until_overflow(own_sizes, usable, samples, seq_length + 1, random)
    sample_map = np.zeros((samples + 1, 2), dtype=np.int64)
    sample_map[:, 0] = starts
    return IndexMaps((entries + documents.start).astype(np.int32), sample_map, shuffle_map)


def _until_overflow(
    sizes: np.ndarray, usable: np.ndarray, samples: int, room: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Fill samples with documents in random order. A document that does not fit begins the next sample.

    Args:
        sizes: Number of tokens of each document.
        usable: Which documents are usable.
        samples: Number of samples to make.
        room: Number of tokens of a sample.
        random: Source of the shuffles.

    Returns:
        The documents in the order of samples, and the entries where samples begin; the last one is the end of the last
        sample [samples + 1].
    """
    order = np.arange(len(sizes))
    tokens = sizes.tolist()
    entries: list[int] = []
    starts: list[int] = []
    left = 0  # room in the last sample
    while True:
        random.shuffle(order)
        for document in order[usable[order]].tolist():
            if not starts or tokens[document] > left:
                starts.append(len(entries))
                left = room
                if len(starts) > samples:
                    return np.array(entries), np.array(starts)
            entries.append(document)
            left -= tokens[document]


def padded_rows(
    source: IndexedDataset, maps: IndexMaps, samples: np.ndarray, width: int, padding: int, dtype: np.dtype
) -> np.ndarray:
    """Return samples of whole documents.

    Args:
        source: Tokens, or their labels.
        maps: Index maps from `build_padded_maps`.
        samples: Numbers of the samples in `sample_map` [n].
        width: Number of tokens of a sample. What does not fit is cut off.
        padding: Value after the last document.
        dtype: Dtype of the rows.

    Returns:
        Rows [n, width].
    """
    rows = np.full((len(samples), width), padding, dtype=dtype)
    firsts = maps.sample_map[samples, 0].tolist()
    ends = maps.sample_map[samples + 1, 0].tolist()
    for row, first, end in zip(rows, firsts, ends, strict=True):
        documents = maps.document_map[first:end].tolist()
        ids = np.concatenate([source[document] for document in documents])
        row[: len(ids)] = ids[:width]
    return rows
