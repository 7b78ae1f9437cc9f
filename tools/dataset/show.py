"""Documents and training samples of a dataset as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from neox.data import GPTDataset, IndexedDataset
from neox.data.samples.gpt_dataset import split_documents
from neox.data.samples.packing import Packing
from neox.errors import DataError
from neox.tokenizer import Tokenizer


@dataclass(frozen=True)
class Row:
    """Document or sample.

    Attributes:
        name: What it is called.
        ids: Token ids [tokens].
        labels: Labels, negative for tokens that are not in the loss [tokens]; None if there are none.
    """

    name: str
    ids: np.ndarray
    labels: np.ndarray | None


@dataclass(frozen=True)
class SampleShape:
    """Settings of a run that determine its samples.

    Attributes:
        split: Shares of train, validation and test, as in NeoX's `split`.
        count: Number of samples of the run.
        seq_length: Tokens of a sample.
        seed: Seed of the run.
        packing: How documents are joined.
    """

    split: str
    count: int
    seq_length: int
    seed: int
    packing: Packing


def documents(data: IndexedDataset, labels: IndexedDataset | None, wanted: str) -> Iterator[Row]:
    """Yield the sequences of documents: one each, or their sentences.

    Args:
        data: The dataset.
        labels: Its labels.
        wanted: Numbers of documents, such as `0,5-7`.

    Raises:
        DataError: If a number does not exist.
    """
    for document in listed(wanted, data.num_documents):
        first, stop = map(int, data.document_index[document : document + 2])
        for number in range(first, stop):
            name = f"document {document}"
            if data.num_documents != len(data):
                name += f", sentence {number - first}"
            yield Row(name, data[number], None if labels is None else labels[number])


def samples(data: IndexedDataset, labels: IndexedDataset | None, wanted: str, shape: SampleShape) -> Iterator[Row]:
    """Yield samples of the training part, as training reads them.

    Args:
        data: The dataset.
        labels: Its labels.
        wanted: Numbers of samples, such as `0,5-7`.
        shape: Settings of the run.

    Raises:
        DataError: If a number does not exist, or documents consist of sentences.
    """
    if data.num_documents != len(data):
        raise DataError(f"{data.prefix} is a dataset of sentences: --samples shows samples of documents; leave it out")
    train = split_documents(shape.split, len(data))[0]
    dataset = GPTDataset(data, train, shape.count, shape.seq_length, shape.seed, packing=shape.packing, labels=labels)
    for number in listed(wanted, dataset.num_samples):
        targets = dataset.read_labels([number])[0] if dataset.has_labels else None
        yield Row(f"sample {number}", dataset.read([number])[0], targets)


def listed(text: str, count: int) -> list[int]:
    """Return the numbers of a list such as `0,5-7`. Raises DataError for numbers from `count` on."""
    numbers: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    except ValueError:
        raise DataError(f"{text!r} is not a list of numbers such as 0,5-7") from None
    if not numbers or max(numbers) >= count:
        raise DataError(f"{text!r} has numbers that do not exist; there are {count:,}, numbered from 0")
    return numbers


def print_rows(rows: Iterable[Row], decoder: Tokenizer | None) -> None:
    """Print documents or samples: as text, or as ids without a decoder.

    With labels, `+` is before lines that are in the loss, and `-` before others.
    """
    for row in rows:
        if row.labels is None:
            print(f"--- {row.name}: {len(row.ids)} tokens\n{_written(row.ids, decoder)}")
            continue
        counted = row.labels >= 0
        print(f"--- {row.name}: {len(row.ids)} tokens, {counted[1:].sum()} in the loss")
        # the first and the last token have a bound outside of them
        bounds = np.flatnonzero(np.diff(counted, prepend=~counted[:1], append=~counted[-1:]))
        for first, stop in pairwise(bounds.tolist()):
            mark = "+" if counted[first] else "-"
            for line in _written(row.ids[first:stop], decoder).split("\n"):
                print(f"{mark} {line}")


def _written(ids: np.ndarray, decoder: Tokenizer | None) -> str:
    if decoder is None:
        return " ".join(map(str, ids))
    return decoder.decode(ids.tolist())
