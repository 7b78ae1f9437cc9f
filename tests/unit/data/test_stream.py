"""Samples of a dataset over changes of their length: every token is read once in a pass, whatever was read before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from neox.data import GPTDataset, IndexedDataset, IndexedDatasetBuilder
from neox.data.mixtures import passes
from neox.data.mixtures.passes import GptNeoxPasses, Lanes, lane_bounds
from neox.data.mixtures.stream import DatasetStream, SamplesRead
from neox.data.samples.rows import TokenRows, TrainingDocuments
from neox.errors import DataError
from tests.errors import raises_naming


@pytest.fixture(autouse=True)
def small_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_LANE_TOKENS", 500)


@pytest.fixture
def data(tmp_path: Path) -> IndexedDataset:
    """Documents of 0 to 100 tokens, about 4,000 together. No token occurs twice."""
    sizes = np.random.default_rng(0).integers(0, 100, size=80)
    with IndexedDatasetBuilder(tmp_path / "x", np.int32) as builder:
        builder.add_documents(np.arange(sizes.sum()), sizes)
    return IndexedDataset(tmp_path / "x")


def stream_of(
    data: IndexedDataset, cache_dir: Path | None = None, gpt_neox: GptNeoxPasses | None = None
) -> DatasetStream:
    return DatasetStream(TrainingDocuments(TokenRows(data, None, None, 65), range(len(data)), cache_dir), 3, gpt_neox)


@pytest.mark.parametrize("seed", range(8))
def test_lanes_are_read_in_turn_and_completely(seed: int) -> None:
    random = np.random.default_rng(seed)
    bounds = np.append(0, np.cumsum(random.integers(0, 200, size=random.integers(1, 8))))
    offsets = np.zeros(len(bounds) - 1, dtype=np.int64)
    read = np.zeros(bounds[-1], dtype=int)
    for _ in range(6):
        length = int(random.integers(1, 30))
        rest = Lanes(bounds, offsets, length)
        count = int(random.integers(rest.samples + 1))
        starts = rest.starts(np.arange(rest.samples))
        assert (starts + length < bounds[np.searchsorted(bounds, starts, side="right")]).all()  # within a lane
        for start in starts[:count].tolist():
            read[start : start + length] += 1
        offsets = rest.offsets_after(count)
        lane_of = np.searchsorted(bounds, starts, side="right").tolist()
        rounds = [lane_of[:number].count(lane) for number, lane in enumerate(lane_of)]
        assert rounds == sorted(rounds)
    assert read.max() <= 1
    rest = Lanes(bounds, offsets, 1)
    for start in rest.starts(np.arange(rest.samples)).tolist():
        read[start] += 1
    assert read.max(initial=0) <= 1
    assert (read == 0).sum() == (np.diff(bounds) > 0).sum()  # the last token of a lane is only a target


def test_lanes_of_equal_size() -> None:
    assert lane_bounds(499).tolist() == [0, 499]
    assert lane_bounds(1501).tolist() == [0, 500, 1000, 1501]


@pytest.mark.parametrize("length", [7, 64])
def test_a_pass_reads_every_token_once_in_another_order(data: IndexedDataset, length: int, tmp_path: Path) -> None:
    stream = stream_of(data, tmp_path / "maps")
    samples = stream.samples_of_pass(length)
    cursor = stream.after([], length)
    first = cursor.read(np.arange(samples))
    second = cursor.read(np.arange(samples, 2 * samples))
    for rows in (first, second):
        counts = np.bincount(rows[:, :-1].ravel(), minlength=data.num_tokens)
        assert counts.max() == 1
        assert (counts == 0).sum() < 8 * (length + 1)  # of eight lanes
    assert not np.array_equal(first, second)
    again = stream_of(data, tmp_path / "maps").after([], length)
    np.testing.assert_array_equal(again.read(np.arange(2 * samples)[::-5]), np.concatenate([first, second])[::-5])
    np.testing.assert_array_equal(cursor.read_labels(np.arange(samples)), first)
    np.testing.assert_array_equal(stream_of(data).after([], length).read(np.arange(samples)), first)


@pytest.mark.parametrize("seed", range(10))
def test_changes_of_length_repeat_nothing_in_a_pass(data: IndexedDataset, seed: int) -> None:
    random = np.random.default_rng(seed)
    stream = stream_of(data)
    history: list[SamplesRead] = []
    counts = np.zeros(data.num_tokens, dtype=int)
    room = data.num_tokens
    while room > 1200:
        length = int(random.choice([5, 16, 33, 64]))
        samples = int(random.integers(1, 1 + 600 // length))
        rows = stream.after(history, length).read(np.arange(samples))
        counts += np.bincount(rows[:, :-1].ravel(), minlength=len(counts))
        history.append(SamplesRead(length, samples))
        room -= samples * length
    assert counts.max() == 1


@pytest.mark.parametrize("length", [16, 40])
def test_a_run_in_gpt_neoxs_order_goes_on_with_what_is_unread(data: IndexedDataset, length: int) -> None:
    dataset = GPTDataset(data, range(len(data)), 150, 16, seed=1)
    assert dataset.num_samples < 2 * 150  # one pass
    gpt_neox = GptNeoxPasses(dataset.maps, 16)
    stream = stream_of(data, gpt_neox=gpt_neox)
    before = dataset.read(np.arange(60))
    np.testing.assert_array_equal(stream.after([], 16).read(np.arange(60)), before)
    rest = stream.after([SamplesRead(16, 60)], length)
    if length == 16:
        left = dataset.num_samples - 60
        np.testing.assert_array_equal(rest.read(np.arange(left)), dataset.read(np.arange(60, dataset.num_samples)))
        next_pass = stream_of(data).after([], 16)
        np.testing.assert_array_equal(rest.read(np.arange(left, left + 5)), next_pass.read(np.arange(5)))
        return
    unread = gpt_neox.unread_documents(np.array([60]), data.sizes)
    samples = (int(data.sizes[unread].sum()) - 1) // length
    assert samples > 5
    counts = np.bincount(before[:, :-1].ravel(), minlength=data.num_tokens)
    counts += np.bincount(rest.read(np.arange(samples - 3))[:, :-1].ravel(), minlength=data.num_tokens)
    assert counts.max() == 1


def test_every_document_is_unread_at_first_and_none_at_the_end(data: IndexedDataset) -> None:
    dataset = GPTDataset(data, range(len(data)), 600, 16, seed=1)
    gpt_neox = GptNeoxPasses(dataset.maps, 16)
    assert len(gpt_neox.unread_documents(np.array([0]), data.sizes)) == len(dataset.maps.document_map)
    unread = gpt_neox.unread_documents(np.array([dataset.num_samples]), data.sizes)
    assert data.sizes[unread].sum() <= 16


def test_a_dataset_shorter_than_a_sample_is_refused(data: IndexedDataset) -> None:
    with raises_naming(DataError, data.prefix, 10_001):
        stream_of(data).after([], 10_000)
