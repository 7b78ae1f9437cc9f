"""Best-fit packing: what is cut, what is padding, and that each token is predicted once in a pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neox.data import GPTDataset, IndexedDataset, IndexedDatasetBuilder
from neox.data.pass_amounts import packing_shares
from neox.data.samples import packing
from neox.data.samples.packing import DocumentPieces, Packing, packed

SIZES = [3, 9, 1, 4, 0, 2, 5, 26, 4, 17]
SEQ = 8
BEST_FIT = Packing("best_fit")


@pytest.fixture
def data(tmp_path: Path) -> IndexedDataset:
    """Token t of document d is 100 * d + t + 1."""
    with IndexedDatasetBuilder(tmp_path / "x", np.int32) as builder:
        for document, size in enumerate(SIZES):
            builder.add_document(100 * document + 1 + np.arange(size))
    return IndexedDataset(tmp_path / "x")


def samples_of_one_pass(data: IndexedDataset) -> int:
    pieces = DocumentPieces.of(np.array(SIZES), np.array(SIZES) > 1, range(10), SEQ)
    order = np.arange(len(pieces))
    return sum(1 for _ in packed(order, pieces.lengths(order), SEQ + 1))


def test_each_token_but_the_first_of_a_document_is_predicted_once_in_a_pass(data: IndexedDataset) -> None:
    dataset = GPTDataset(data, range(10), samples_of_one_pass(data), SEQ, seed=1, packing=BEST_FIT)
    numbers = np.arange(dataset.num_samples)
    tokens = dataset.read(numbers)
    labels = dataset.read_labels(numbers)
    assert tokens.shape == (dataset.num_samples, SEQ + 1)
    shown = tokens[labels != -100]
    assert (labels[labels != -100] == shown).all()
    expected = [100 * document + t + 1 for document, size in enumerate(SIZES) if size > 1 for t in range(size)]
    # The first token of a piece stands there without a loss, except at the start of its document.
    assert sorted(shown.tolist()) == expected


def test_a_document_is_cut_only_if_it_is_longer_than_a_sample(data: IndexedDataset) -> None:
    dataset = GPTDataset(data, range(10), 40, SEQ, seed=1, packing=BEST_FIT)
    for row in dataset.read(np.arange(40)):
        for document in set((row[row > 0] - 1) // 100):
            own = row[(row > 0) & ((row - 1) // 100 == document)]
            assert len(own) == SIZES[document] or SIZES[document] > SEQ + 1
            assert (np.diff(own) == 1).all()


def test_the_order_is_a_function_of_the_seed(data: IndexedDataset) -> None:
    first, again, other = (GPTDataset(data, range(10), 30, SEQ, seed=seed, packing=BEST_FIT) for seed in (1, 1, 2))
    numbers = np.arange(30)
    assert (first.read(numbers) == again.read(numbers)).all()
    assert (first.read(numbers) != other.read(numbers)).any()


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(2, 60), min_size=1, max_size=80), window=st.integers(1, 90))
def test_samples_hold_every_piece_once_and_never_too_many_tokens(sizes: list[int], window: int) -> None:
    pieces = DocumentPieces.of(np.array(sizes), np.ones(len(sizes), dtype=bool), range(len(sizes)), SEQ)
    order = np.random.RandomState(0).permutation(len(pieces))
    lengths = pieces.lengths(np.arange(len(pieces)))
    whole = packing.WINDOW
    packing.WINDOW = window
    try:
        samples = list(packed(order, pieces.lengths(order), SEQ + 1))
    finally:
        packing.WINDOW = whole
    assert sorted(piece for sample in samples for piece in sample) == list(range(len(pieces)))
    rooms = [SEQ + 1 - int(lengths[sample].sum()) for sample in samples]
    assert min(rooms) >= 0
    if window >= len(pieces):  # a decreasing order never leaves two samples that fit into one
        assert sum(room >= (SEQ + 1) / 2 for room in rooms) <= 1


def test_shares_of_padding_and_of_cut_documents() -> None:
    assert packing_shares(np.array([9, 9]), "best_fit", SEQ) == (0.0, 0.0)
    padding, cut = packing_shares(np.array([9, 26, 4, 5]), "best_fit", SEQ)
    assert cut == 0.25
    assert padding == pytest.approx(1 - (9 + 9 + 9 + 9 + 2 + 4 + 5) / 54)
    assert packing_shares(np.array([], dtype=np.int32), "best_fit", SEQ) == (0.0, 0.0)
    sizes = np.array([9, 4, 5, 12])
    assert packing_shares(sizes, "unpacked", SEQ) == (pytest.approx(1 - (9 + 4 + 5 + 9) / 36), 0.25)
    assert packing_shares(sizes, "pack_until_overflow", SEQ) == (0.0, 0.25)
