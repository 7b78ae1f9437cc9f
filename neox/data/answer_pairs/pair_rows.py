"""Rows of whole pairs of answers for training on preferences: which pairs share a row, and what a row holds.

A row holds as many pairs as fit. Each document is kept apart from the others, so nothing is padded but the end of the
row:

    row    | prompt 0, chosen 0 | prompt 0, rejected 0 | prompt 1, chosen 1 | prompt 1, rejected 1 | padding |
    slot           0                      1                     2                      3

Legend: B rows, S positions of a row, P most pairs of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from neox.config.sections.data import PackImpl
from neox.data.answer_pairs.answers import ANSWERS_PER_PAIR, AnswerPairs, PromptAnswer
from neox.data.samples.rows import RowLayout
from neox.errors import DataError
from neox.log import get_logger

_log = get_logger(__name__)

FIELDS_OF_PAIRS = frozenset({"pair_mask", "desirable", "reference", "ends"})
"""Fields of a batch that hold something for each pair or answer of a row. All others have one number for each token."""
NO_SLOT = -1
"""Slot of padding."""
_OPEN_ROWS = 32
"""Rows that are filled at the same time."""
_NAMED = 3
"""Bad pairs that a message names."""


class PairRows(NamedTuple):
    """Pairs of each row.

    Attributes:
        pairs: Numbers of the pairs, row after row.
        starts: Entry in `pairs` where each row begins; the last one is the end of the last row [rows + 1].
    """

    pairs: np.ndarray
    starts: np.ndarray


def usable_pairs(pairs: AnswerPairs, seq_length: int, *, skip_bad: bool) -> np.ndarray:
    """Return the numbers of the pairs that can be trained on.

    Raises:
        DataError: If a pair cannot, unless such pairs are skipped; or if none can.
    """
    usable = []
    bad = []
    for number in range(len(pairs)):
        problem = pairs.problem(number, seq_length)
        if problem is None:
            usable.append(number)
        else:
            bad.append(f"{pairs.name(number)}: {problem}")
    if bad:
        named = "; ".join(bad[:_NAMED])
        found = f"{len(bad):,} of {len(pairs):,} pairs of answers cannot be trained on: {named}"
        if not skip_bad:
            raise DataError(f"{found}; make the data anew, or leave such pairs out with skip_bad_pairs: true")
        _log.warning("skip_bad_pairs: %s", found)
    if not usable:
        raise DataError("there is no pair of answers to train on")
    return np.array(usable)


def pack_pairs(
    pairs: AnswerPairs, usable: np.ndarray, rows: int | None, seq_length: int, seed: int, impl: PackImpl
) -> PairRows:
    """Divide pairs into rows, in as many passes over them as the rows need.

    Args:
        pairs: The pairs.
        usable: Numbers of those that are used.
        rows: Number of rows to make; None for those of one pass.
        seq_length: Number of positions of a row.
        seed: Seed of the shuffles.
        impl: Kind of packing, as `PreferenceDataset` takes it.
    """
    found: list[list[int]] = []
    for rows_of_pass in rows_of_passes(pairs, usable, seq_length, seed, impl):
        found += rows_of_pass
        if rows is None or len(found) >= rows:
            break
    if rows is not None:
        del found[rows:]
    lengths = list(map(len, found))
    return PairRows(np.concatenate(found), np.concatenate([[0], np.cumsum(lengths)]))


def rows_of_passes(
    pairs: AnswerPairs, usable: np.ndarray, seq_length: int, seed: int, impl: PackImpl
) -> Iterator[list[list[int]]]:
    """Yield the pairs of each row of one pass over them after the other, without end. Arguments as for `pack_pairs`."""
    random = np.random.RandomState(seed)
    sizes = pairs.sizes.sum(axis=1)
    while True:
        order = random.permutation(usable)
        yield _rows_of_pass(order.tolist(), sizes[order].tolist(), seq_length, impl)


def _rows_of_pass(order: list[int], sizes: list[int], room: int, impl: PackImpl) -> list[list[int]]:
    """Return the pairs of each row of one pass. A pair goes into the open row that it fills best.

    Args:
        order: Numbers of the pairs.
        sizes: Positions of each.
        room: Positions of a row.
        impl: Kind of packing.
    """
    if impl == "unpacked":
        return [[number] for number in order]
    limit = _OPEN_ROWS if impl == "packed" else 1
    rows: list[list[int]] = []
    open_rows: list[int] = []
    left: list[int] = []  # room in each row
    for number, size in zip(order, sizes, strict=True):
        fitting = [row for row in open_rows if left[row] >= size]
        if fitting:
            row = min(fitting, key=left.__getitem__)
        else:
            row = len(rows)
            rows.append([])
            left.append(room)
            open_rows.append(row)
        rows[row].append(number)
        left[row] -= size
        if len(open_rows) > limit:
            open_rows.remove(min(open_rows, key=left.__getitem__))
    return rows


class PreferenceDataset:
    """Rows of pairs of answers, shuffled anew in every pass.

    Args:
        pairs: The pairs.
        num_samples: Number of rows that the run reads; None for those of one pass.
        seq_length: Number of positions of a row.
        seed: Seed of the shuffles.
        impl: `unpacked` puts one pair in a row, `pack_until_overflow` fills one row after the other, and `packed` fills
            several rows at a time, which leaves less padding.
        skip_bad: Whether pairs that cannot be trained on are left out. Otherwise they are an error.
        reference: Log-probabilities of each pair's documents by the reference model [pairs, 2]; None without one.

    Attributes:
        num_samples: Number of rows.
        row_pairs: Pairs of each row.

    Raises:
        DataError: If there is no usable pair, or one that cannot be trained on.
    """

    has_labels = True

    def __init__(
        self,
        pairs: AnswerPairs,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        *,
        impl: PackImpl = "packed",
        skip_bad: bool = False,
        reference: np.ndarray | None = None,
    ) -> None:
        self.pairs = pairs
        self.seq_length = seq_length
        self.reference = reference
        usable = usable_pairs(pairs, seq_length, skip_bad=skip_bad)
        rows = None if num_samples is None else max(1, num_samples)
        self.row_pairs = pack_pairs(pairs, usable, rows, seq_length, seed, impl)
        self.num_samples = len(self.row_pairs.starts) - 1

    def numbers(self, row: int) -> np.ndarray:
        """Return the numbers of the pairs in a row."""
        first, end = self.row_pairs.starts[row : row + 2]
        return self.row_pairs.pairs[first:end]

    @property
    def filled(self) -> float:
        """Share of the positions of all rows that are not padding."""
        used = int(self.pairs.sizes[self.row_pairs.pairs].sum())
        return used / (self.num_samples * self.seq_length)

    def fields(self, rows: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Return the fields of a batch of rows, as `layout_rows` does, and what is known of their pairs.

        Next to them are `desirable` [B, P] for judged answers, and `reference` [B, 2 P] with a reference model.
        """
        numbers = [self.numbers(int(row)) for row in rows]
        documents = []
        for own in numbers:
            row: list[PromptAnswer] = []
            for number in own:
                row += self.pairs.documents(int(number))
            documents.append(row)
        fields = layout_rows(documents, self.seq_length, keeps_last=self.pairs.keeps_last)
        shape = fields["pair_mask"].shape
        if self.pairs.desirable is not None:
            fields["desirable"] = np.zeros(shape, dtype=np.int64)
            for values, own in zip(fields["desirable"], numbers, strict=True):
                values[: len(own)] = self.pairs.desirable[own]
        if self.reference is not None:
            fields["reference"] = np.zeros((shape[0], ANSWERS_PER_PAIR * shape[1]), dtype=np.float32)
            for values, own in zip(fields["reference"], numbers, strict=True):
                values[: ANSWERS_PER_PAIR * len(own)] = self.reference[own].reshape(-1)
        return fields

    def layout(self, indices: np.ndarray) -> RowLayout:
        """Raise NotImplementedError. The fields of a batch say where documents start."""
        raise NotImplementedError

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of rows [B, S]."""
        return self.fields(indices)["tokens"]

    def read_labels(self, indices: np.ndarray) -> np.ndarray:
        """Return the next token at each position of rows [B, S]."""
        return self.fields(indices)["labels"]


def layout_rows(
    rows: Sequence[Sequence[PromptAnswer]], seq_length: int, *, keeps_last: bool = False
) -> dict[str, np.ndarray]:
    """Lay documents out in rows.

    Args:
        rows: Documents of each row, two for each pair.
        seq_length: S.
        keeps_last: Whether rows include the last token of each document.

    Returns:
        `tokens` and `labels` (the next tokens of the document), `document_starts` (the position where the document of
        each position starts), `slots` (the number of the document in its row, NO_SLOT for padding) and `in_answer`
        (1 if the label belongs to the answer), int64 [B, S] each; and `pair_mask`, 1 for each pair of the row, fp32
        [B, P]. With `keeps_last` also `ends`, the last position of each document, int64 [B, 2 P].
    """
    shape = (len(rows), seq_length)
    tokens = np.zeros(shape, dtype=np.int64)
    labels = np.zeros(shape, dtype=np.int64)
    starts = np.zeros(shape, dtype=np.int64)
    slots = np.full(shape, NO_SLOT, dtype=np.int64)
    in_answer = np.zeros(shape, dtype=np.int64)
    most = max(len(documents) for documents in rows)
    pair_mask = np.zeros((len(rows), most // ANSWERS_PER_PAIR), dtype=np.float32)
    ends = np.zeros((len(rows), most), dtype=np.int64)
    for row, documents in enumerate(rows):
        pair_mask[row, : len(documents) // ANSWERS_PER_PAIR] = 1
        begin = 0
        for slot, document in enumerate(documents):
            predicting = slice(begin, begin + len(document.ids) - 1)
            labels[row, predicting] = document.ids[1:]
            in_answer[row, predicting] = document.in_answer[1:]
            end = predicting.stop + keeps_last
            here = slice(begin, end)
            tokens[row, here] = document.ids[: end - begin]
            starts[row, here] = begin
            slots[row, here] = slot
            ends[row, slot] = end - 1
            begin = end
        starts[row, begin:] = begin
    fields: dict[str, np.ndarray] = {
        "tokens": tokens,
        "labels": labels,
        "document_starts": starts,
        "slots": slots,
        "in_answer": in_answer,
        "pair_mask": pair_mask,
    }
    if keeps_last:
        fields["ends"] = ends
    return fields
