"""Samples, blends and shares of documents, against gpt-neox's definitions."""

from pathlib import Path

import numpy as np
import pytest

from neox.data import BlendedDataset, GPTDataset, IndexedDataset, IndexedDatasetBuilder
from neox.data.mixtures.blend import blend_indices, normalized, samples_of_each, weights_by_documents
from neox.data.samples.gpt_dataset import split_documents
from neox.errors import ConfigError, DataError
from tests.errors import raises_naming

GOLDEN = Path(__file__).parents[2] / "golden" / "data" / "small_text_document"


def test_a_sample_is_the_tokens_between_two_bounds():
    data = IndexedDataset(GOLDEN)
    dataset = GPTDataset(data, range(100, 400), 500, 64, seed=3)
    order, bounds, shuffled = dataset.maps.document_map, dataset.maps.sample_map, dataset.maps.shuffle_map
    assert len(dataset) == len(shuffled) - 1 >= 499
    stream = np.concatenate([data[i] for i in order])
    for index in range(len(shuffled)):  # one more than len(): the last sample exists too
        np.testing.assert_array_equal(dataset[index], stream[shuffled[index] * 64 : shuffled[index] * 64 + 65])
    rows = dataset.read(range(0, 200, 3))
    assert rows.dtype == data.dtype
    assert (rows == np.stack([dataset[i] for i in range(0, 200, 3)])).all()
    assert (bounds[:, 1] < data.sizes[order[bounds[:, 0]]]).all()


def test_a_long_document_gives_samples_within_it(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", np.int32) as builder:
        builder.add_document(np.arange(1000))
        builder.add_document([])
    dataset = GPTDataset(IndexedDataset(tmp_path / "x"), range(2), 90, 10, seed=0, cache_dir=tmp_path / "maps")
    starts = sorted(int(dataset[i][0]) for i in range(dataset.num_samples))
    assert starts == list(range(0, 990, 10))
    assert all((np.diff(dataset[i]) == 1).all() for i in range(dataset.num_samples))


def test_unfit_documents_are_refused(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", np.int32) as builder:
        builder.add_documents(np.arange(10), [5, 5])
    data = IndexedDataset(tmp_path / "x")
    assert len(GPTDataset(data, range(2), 0, 4, seed=0)) == 1
    with raises_naming(DataError, data.prefix, "seq_length", 11):
        GPTDataset(data, range(2), 0, 10, seed=0)
    for documents in (range(0), range(1, 3), range(0, 2, 2)):
        with raises_naming(DataError, data.prefix, documents):
            GPTDataset(data, documents, 1, 4, seed=0)


def neox_blend(weights, size):
    """gpt-neox's rule, one sample after the other."""
    weights, counts, chosen = weights / weights.sum(), [0] * len(weights), []
    for i in range(size):
        errors = [weight * max(float(i), 1.0) - count for weight, count in zip(weights, counts, strict=True)]
        chosen.append(errors.index(max(errors)))
        counts[chosen[-1]] += 1
    return np.array(chosen)


@pytest.mark.parametrize("datasets", [1, 2, 3, 7, 40])
def test_blends_are_gpt_neoxs(datasets):
    random = np.random.default_rng(datasets)
    for weights in (np.ones(datasets), random.random(datasets) ** 4 + 1e-5, np.arange(1.0, datasets + 1)):
        for size in (1, 1000, 30_011):
            chosen, numbers = blend_indices(weights, size)
            np.testing.assert_array_equal(chosen, neox_blend(weights, size))
            for dataset in range(datasets):
                mine = numbers[chosen == dataset]
                np.testing.assert_array_equal(mine, np.arange(len(mine)))


def test_a_blend_reads_its_parts_and_begins_again_where_one_ends(tmp_path):
    parts = []
    for name, first, dtype in (("a", 0, np.uint16), ("b", 1000, np.int32)):
        with IndexedDatasetBuilder(tmp_path / name, dtype) as builder:
            builder.add_document(np.arange(first, first + 101))
        parts.append(GPTDataset(IndexedDataset(tmp_path / name), range(1), 10, 10, seed=1))
    blend = BlendedDataset(parts, [9, 1], tmp_path / "maps")
    assert (len(blend), blend.seq_length, blend.dtype) == (18, 10, np.int32)
    rows = blend.read(np.arange(len(blend)))
    from_b = rows[:, 0] >= 1000
    assert from_b.sum() == 2
    for i in range(len(blend)):
        part = parts[int(from_b[i])]
        number = int(blend.dataset_sample_index[i])
        np.testing.assert_array_equal(blend[i], part[number if number < part.num_samples else number % len(part)])
    again = BlendedDataset(parts, [9, 1], tmp_path / "maps")
    assert (again.dataset_index == blend.dataset_index).all()
    with pytest.raises(DataError):
        BlendedDataset(parts, [1])


@pytest.mark.parametrize(
    ("split", "documents", "expected"),
    [
        ("969, 30, 1", 1648, [0, 1597, 1646, 1648]),
        ("969,30,1", 10, [0, 10, 10, 10]),
        ("1/1/1", 10, [0, 4, 7, 10]),
        ("100", 7, [0, 7, 7, 7]),
        ("1,1", 5, [0, 3, 5, 5]),
        ("0.5, 0.25, 0.25, 9", 8, [0, 4, 6, 8]),
        ("1,1,1", 0, [0, 0, 0, 0]),
    ],
)
def test_split_is_neoxs(split, documents, expected):
    parts = split_documents(split, documents)
    assert [parts[0].start, *(part.stop for part in parts)] == expected


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "-1,2,3", "nan,1,1", "inf"])
def test_a_senseless_split_is_refused(split):
    with raises_naming(ConfigError, f"split: {split}"):
        split_documents(split, 10)


def test_weights_follow_neoxs_formulas():
    assert normalized([1, 3]) == [0.25, 0.75]
    assert samples_of_each([0.25, 0.75], 1000) == [252, 754]
    counts, alpha = [100, 300, 600], 0.3
    lifted = np.array([0.1, 0.3, 0.6]) ** alpha
    expected = lifted / lifted.sum() * np.array([0.9, 0.7, 0.4])
    np.testing.assert_allclose(weights_by_documents(counts, alpha), expected / expected.sum(), rtol=1e-12)
    assert weights_by_documents([5], alpha) == [1.0]
    for bad in ([], [0, 0], [-1, 2]):
        with raises_naming(DataError, bad):
            normalized(bad)
