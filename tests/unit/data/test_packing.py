"""Padded samples and labels: what is in a row, what is predicted, and the order of later gpt-neox."""

from pathlib import Path

import numpy as np
import pytest

from neox.config.sections.data import DataConfig, PackImpl
from neox.data import GPTDataset, IndexedDataset, IndexedDatasetBuilder
from neox.data.batches import BatchIterator
from neox.data.run_datasets import DatasetFactory, SampleCounts
from neox.data.samples.packing import Packing
from neox.errors import DataError
from tests.errors import raises_naming

SIZES = [3, 9, 1, 4, 0, 2, 5, 12, 4, 4]
SEQ = 8
ROOM = SEQ + 1


@pytest.fixture
def data(tmp_path: Path) -> IndexedDataset:
    """Token t of document d is 100 * d + t + 1."""
    with IndexedDatasetBuilder(tmp_path / "x", np.int32) as builder:
        for document, size in enumerate(SIZES):
            builder.add_document(100 * document + 1 + np.arange(size))
    return IndexedDataset(tmp_path / "x")


@pytest.fixture
def labels(data: IndexedDataset) -> IndexedDataset:
    """The last two tokens of each document are counted; of document 3 none, of document 7 those past a sample."""
    prefix = data.prefix + "_label"
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        for document, size in enumerate(SIZES):
            ids = np.array(data[document])
            ids[: max(0, size - 2)] = -100
            if document == 3:
                ids[:] = -100
            builder.add_document(ids)
    return IndexedDataset(prefix)


def rows(dataset: GPTDataset) -> tuple[list[list[int]], list[list[int]]]:
    numbers = np.arange(dataset.num_samples)
    return dataset.read(numbers).tolist(), dataset.read_labels(numbers).tolist()


def test_one_document_for_each_sample(data: IndexedDataset) -> None:
    dataset = GPTDataset(data, range(10), 8, SEQ, seed=1, packing=Packing("unpacked"))
    tokens, targets = rows(dataset)
    kept = [document for document, size in enumerate(SIZES) if size > 1]
    assert sorted(row[0] // 100 for row in tokens) == kept == sorted({row[0] // 100 for row in tokens})
    for row, target in zip(tokens, targets, strict=True):
        own = data[row[0] // 100][:ROOM].tolist()
        padding = ROOM - len(own)
        assert row == own + [0] * padding
        assert target == own + [-100] * padding
    short = GPTDataset(data, range(10), 7, SEQ, seed=1, packing=Packing("unpacked", allow_chopped=False))
    assert 7 not in {row[0] // 100 for row in rows(short)[0]}


def test_documents_fill_a_sample_until_one_does_not_fit(data: IndexedDataset) -> None:
    dataset = GPTDataset(data, range(10), 30, SEQ, seed=1, packing=Packing("pack_until_overflow"))
    assert dataset.num_samples == 30
    bounds, order = dataset.maps.sample_map[:, 0], dataset.maps.document_map
    assert sorted(order[:8].tolist()) == [document for document, size in enumerate(SIZES) if size > 1]
    for i in range(30):
        documents = order[bounds[i] : bounds[i + 1]].tolist()
        whole = np.concatenate([data[d] for d in documents])
        assert len(whole) <= ROOM or len(documents) == 1
        if i < 29:
            assert len(whole) + SIZES[order[bounds[i + 1]]] > ROOM
        sample = int(np.flatnonzero(dataset.maps.shuffle_map == i)[0])
        np.testing.assert_array_equal(dataset[sample][: len(whole)], whole[:ROOM])


def test_draws_are_gpt_neoxs(data: IndexedDataset) -> None:
    random = np.random.RandomState(5)
    samples, order = np.arange(6), np.arange(10)
    random.shuffle(samples)
    random.shuffle(order)
    dataset = GPTDataset(data, range(10), 6, SEQ, seed=5, packing=Packing("pack_until_overflow"))
    assert dataset.maps.shuffle_map.tolist() == samples.tolist()
    assert dataset.maps.document_map[:8].tolist() == [d for d in order.tolist() if SIZES[d] > 1][:8]


def test_documents_that_count_nothing_are_left_out(data: IndexedDataset, labels: IndexedDataset) -> None:
    dataset = GPTDataset(data, range(10), 6, SEQ, seed=1, packing=Packing("unpacked"), labels=labels)
    tokens, targets = rows(dataset)
    assert {row[0] // 100 for row in tokens} == {0, 1, 5, 6, 8, 9}
    assert all(max(target[1:]) > 0 for target in targets)
    with raises_naming(DataError, data.prefix, labels.prefix):
        GPTDataset(data, range(3, 5), 6, SEQ, seed=1, packing=Packing("unpacked"), labels=labels)


@pytest.mark.parametrize("impl", ["packed", "pack_until_overflow"])
def test_labels_stay_beside_their_tokens(data: IndexedDataset, labels: IndexedDataset, impl: str) -> None:
    dataset = GPTDataset(data, range(10), 5, SEQ, seed=1, packing=Packing(impl), labels=labels)
    label_of = dict(zip(data.tokens.tolist(), labels.tokens.tolist(), strict=True))
    tokens, targets = rows(dataset)
    assert targets == [[label_of.get(token, -100) for token in row] for row in tokens]
    iterator = BatchIterator(dataset, 2, num_workers=0)
    batch = next(iterator)
    for name, n in (("loss_mask", 0), ("labels", 1)):
        expected = [[(label >= 0, max(label, 0))[n] for label in row[1:]] for row in targets[:2]]
        assert batch[name].tolist() == expected
    assert batch["tokens"].tolist() == [row[:-1] for row in tokens[:2]]


@pytest.mark.parametrize("impl", ["packed", "unpacked"])
def test_labels_can_hold_the_ignored_label(tmp_path: Path, impl: str) -> None:
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_documents(np.arange(40_000, 40_040), [20, 20])
    data = IndexedDataset(tmp_path / "x")
    for labels in (None, data):
        dataset = GPTDataset(data, range(2), 4, SEQ, seed=1, packing=Packing(impl), labels=labels)
        assert dataset.read([0]).dtype == np.uint16
        assert dataset.read_labels([0]).dtype == np.int32


def test_labels_of_a_blend(data: IndexedDataset, labels: IndexedDataset) -> None:
    run = {"seq_length": SEQ, "seed": 1, "vocab_size": 2000}
    paths = (data.prefix, data.prefix)
    config = DataConfig(train_data_paths=paths, train_label_data_paths=(labels.prefix, labels.prefix))
    sets = DatasetFactory(config, **run).datasets(SampleCounts(6, 0, 0))
    assert sets.train is not None
    assert sets.train.has_labels
    numbers = np.arange(6)
    counted = sets.train.read_labels(numbers) >= 0
    assert 0 < counted.sum() < counted.size
    np.testing.assert_array_equal(sets.train.read_labels(numbers)[counted], sets.train.read(numbers)[counted])
    other = labels.prefix + "_other"
    with IndexedDatasetBuilder(other, np.int32) as builder:
        builder.add_documents(labels.tokens, [4, 8, *SIZES[2:]])
    for wrong in (other, data.prefix + "_none"):
        bad = config.model_copy(update={"train_label_data_paths": (labels.prefix, wrong)})
        with raises_naming(DataError, wrong):
            DatasetFactory(bad, **run).datasets(SampleCounts(6, 0, 0))


@pytest.mark.parametrize("impl", ["unpacked", "pack_until_overflow", "best_fit"])
def test_samples_of_one_pass_hold_each_document_once(data: IndexedDataset, impl: PackImpl) -> None:
    """Those of less than two tokens predict nothing; `unpacked` and `pack_until_overflow` cut longer ones."""
    dataset = GPTDataset(data, range(10), None, SEQ, seed=1, packing=Packing(impl))
    _, found = rows(dataset)
    predicted = sorted(label for row in found for label in row if label >= 0)
    longest = max(SIZES) if impl == "best_fit" else ROOM
    expected = [
        100 * document + 1 + t for document, size in enumerate(SIZES) if size > 1 for t in range(min(size, longest))
    ]
    assert predicted == expected
