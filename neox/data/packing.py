"""Samples of whole documents: one or several to a sample, padded (`pack_impl` other than `packed`).

The draws are later gpt-neox's: of the samples, and of the documents in each pass over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neox.config.sections.data import PackImpl
from neox.data.index_maps import IndexMaps, shuffled
from neox.data.indexed_dataset import IndexedDataset
from neox.errors import DataError


@dataclass(frozen=True)
class Packing:
    """How documents make samples.

    Attributes:
        impl: `packed` joins and cuts documents, `pack_until_overflow` puts as many whole documents into a sample as
            fit, `unpacked` puts one into each.
        allow_chopped: Whether a document longer than a sample is cut at its end; otherwise it is left out.
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
    """Return which documents can be a sample: short enough where they may not be cut, with a token to predict.

    Args:
        indexed: The token dataset.
        labels: Its labels; None counts every token.
        documents: Documents to use.
        seq_length: Tokens of a sample's input.
        allow_chopped: Whether longer documents are cut.

    Returns:
        Whether each is usable, bool [documents].

    Raises:
        DataError: If none is.
    """
    sizes = np.asarray(indexed.sizes[documents.start : documents.stop])
    usable = sizes > 1 if allow_chopped else (sizes > 1) & (sizes <= seq_length + 1)
    if labels is not None:
        usable &= _labelled(labels, seq_length)[documents.start : documents.stop]
    if not usable.any():
        cause = "" if labels is None else f", and no label within {seq_length + 1} tokens that {labels.prefix} counts"
        long = "" if allow_chopped else f" of at most seq_length + 1 = {seq_length + 1} tokens (allow_chopped is false)"
        raise DataError(
            f"{indexed.prefix}: documents {documents.start} to {documents.stop} hold no document{long} with two tokens"
            f"{cause}: use other data, a longer seq_length or `pack_impl: packed`"
        )
    return usable


def _labelled(labels: IndexedDataset, seq_length: int) -> np.ndarray:
    """Return whether each document counts a token after its first, within a sample, bool [documents]."""
    result = np.empty(len(labels), dtype=bool)
    for first, sizes, ids in labels.pieces():
        before = np.concatenate([[0], np.cumsum(ids >= 0, dtype=np.int64)])  # counted tokens before each
        ends = np.cumsum(sizes, dtype=np.int64)
        begins = ends - sizes
        second, last = np.minimum(begins + 1, ends), np.minimum(begins + seq_length + 1, ends)
        result[first : first + len(sizes)] = before[last] > before[second]
    return result


def samples_of_pass(sizes: np.ndarray, impl: PackImpl, seq_length: int) -> int:
    """Count the padded samples of usable documents of these sizes, in this order."""
    if impl == "unpacked":
        return len(sizes)
    samples = left = 0
    for size in sizes.tolist():
        if not samples or size > left:
            samples, left = samples + 1, seq_length + 1
        left -= size
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
    """Build the index maps of padded samples; sample i is the documents from entry sample_map[i, 0] to the next one's.

    Args:
        sizes: Tokens of every sequence of the dataset.
        documents: Sequences to use.
        usable: Which of them, from `usable_documents`.
        impl: `pack_until_overflow` or `unpacked`.
        num_samples: Samples that the run reads; as many are made, over several passes if needed.
        seq_length: Tokens of a sample's input.
        seed: Of the shuffles.
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
    """Fill samples with documents in random order; one that does not fit begins the next sample.

    Returns:
        Documents in the order of samples, and the entry where each sample begins and the last one ends [samples + 1].
    """
    order, tokens = np.arange(len(sizes)), sizes.tolist()
    entries: list[int] = []
    starts: list[int] = []
    left = 0
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
