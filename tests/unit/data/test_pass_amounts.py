"""Lengths in epochs: the samples counted are those that the datasets cut."""

import numpy as np
import pytest

from neox.config.sections.data import DataConfig
from neox.data import IndexedDataset, IndexedDatasetBuilder
from neox.data.pass_amounts import samples_of_epochs
from neox.data.samples.gpt_dataset import GPTDataset
from neox.data.samples.index_maps import count_epochs
from neox.data.samples.packing import Packing
from neox.errors import DataError
from tests.errors import raises_naming


@pytest.fixture
def prefix(tmp_path):
    """30 documents of 10 tokens."""
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_documents(np.arange(300) % 50, [10] * 30)
    return str(tmp_path / "x")


@pytest.mark.parametrize("epochs", [0.3, 1, 1.5, 2, 3])
def test_as_many_samples_as_the_dataset_cuts_without_another_pass(prefix, epochs):
    data = DataConfig(data_path=prefix, split="90,10")  # 27 documents
    samples = samples_of_epochs(data, 8, epochs)
    assert samples == (round(270 * epochs) - 1) // 8
    cut = GPTDataset(IndexedDataset(prefix), range(27), samples, 8, 1)
    assert cut.num_samples >= samples
    assert cut.num_samples == samples or epochs % 1
    assert count_epochs(270, 8, samples) <= max(1, epochs + 0.5)


def test_a_blend_has_the_samples_of_all_its_datasets(prefix):
    data = DataConfig(train_data_paths=(prefix, prefix), train_data_weights=(0.9, 0.1), split="1")
    assert samples_of_epochs(data, 8, 1) == 2 * (299 // 8)


@pytest.mark.parametrize(("impl", "samples"), [("unpacked", 27), ("pack_until_overflow", 14)])
def test_samples_of_whole_documents(prefix, impl, samples):
    data = DataConfig(data_path=prefix, split="90,10", pack_impl=impl)
    assert [samples_of_epochs(data, 20, epochs) for epochs in (1, 2, 0.5)] == [samples, 2 * samples, samples // 2]
    maps = GPTDataset(IndexedDataset(prefix), range(27), samples, 20, 1, packing=Packing(impl)).maps
    assert len(set(maps.document_map.tolist())) == 27 <= len(maps.document_map) <= 28  # another order, nearly once each


def test_answers_that_only_best_fit_reads(tmp_path):
    """The labels of every second document stand behind its first sample, which best_fit alone reads."""
    late = np.where(np.arange(30) < 25, -100, 1)
    early = np.where(np.arange(30) < 5, -100, 1)
    with (
        IndexedDatasetBuilder(tmp_path / "x", np.uint16) as texts,
        IndexedDatasetBuilder(tmp_path / "x_label", np.int32) as labels,
    ):
        for number in range(10):
            texts.add_document(np.ones(30, np.int32))
            labels.add_document(late if number % 2 else early)
    prefix = str(tmp_path / "x")
    opened = IndexedDataset(prefix), IndexedDataset(f"{prefix}_label")
    for impl, documents in (("best_fit", 10), ("unpacked", 5)):
        data = DataConfig(train_data_paths=(prefix,), train_label_data_paths=(f"{prefix}_label",), pack_impl=impl)
        samples = samples_of_epochs(data, 15, 1)
        assert samples == documents * (2 if impl == "best_fit" else 1)
        cut = GPTDataset(opened[0], range(10), samples, 15, 1, packing=Packing(impl), labels=opened[1])
        assert len(cut.maps.document_map) == samples


def test_data_that_is_not_there(tmp_path):
    with raises_naming(DataError, tmp_path / "none"):
        samples_of_epochs(DataConfig(data_path=str(tmp_path / "none")), 8, 1)
