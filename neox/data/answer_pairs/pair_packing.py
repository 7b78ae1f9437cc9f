"""Packing of pairs of answers into rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from neox.config.sections.data import PackImpl
from neox.data.answer_pairs.answers import AnswerPairs
from neox.errors import DataError
from neox.log import get_logger

_log = get_logger(__name__)
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
    pairs: AnswerPairs, usable: np.ndarray, rows: int, seq_length: int, seed: int, impl: PackImpl
) -> PairRows:
    """Divide pairs into rows, in as many passes over them as the rows need.

    Args:
        pairs: The pairs.
        usable: Numbers of those that are used.
        rows: Number of rows to make.
        seq_length: Number of positions of a row.
        seed: Seed of the shuffles.
        impl: Kind of packing, as `PreferenceDataset` takes it.
    """
    found: list[list[int]] = []
    for rows_of_pass in passes(pairs, usable, seq_length, seed, impl):
        found += rows_of_pass
        if len(found) >= rows:
            break
    del found[rows:]
    lengths = list(map(len, found))
    return PairRows(np.concatenate(found), np.concatenate([[0], np.cumsum(lengths)]))


def passes(
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
