"""Index maps: the arrays of gpt-neox's loops, kept on disk by content."""

import errno
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from neox.data.samples import index_maps
from neox.data.samples.index_maps import build_index_maps, content_key, count_epochs
from neox.data.samples.map_cache import load_or_build
from neox.errors import DataError
from tests.errors import raises_naming


def neox_maps(sizes, documents, num_samples, seq_length, seed):
    """The arrays as gpt-neox defines them: one document and one sample after the other."""
    tokens, epochs = int(sizes[documents].sum()), 1
    while (epochs * tokens - 1) // seq_length < num_samples:
        epochs += 1
    random = np.random.RandomState(seed=seed)
    order = np.concatenate([np.asarray(documents, dtype=np.int32)] * epochs)
    random.shuffle(order)
    samples = (epochs * tokens - 1) // seq_length
    bounds, at, offset = [(0, 0)], 0, 0
    for _ in range(samples):
        left = seq_length + 1
        while left:
            length = sizes[order[at]] - offset
            left -= length
            if left <= 0:
                offset += left + length - 1
                left = 0
            else:
                at, offset = at + 1, 0
        bounds.append((at, offset))
    shuffled = np.arange(samples, dtype=np.uint32)
    random.shuffle(shuffled)
    return order, np.array(bounds, dtype=np.int32), shuffled


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num_samples", "seq_length"), [(1, 8), (37, 8), (300, 16), (5, 500)])
@pytest.mark.parametrize("piece", [7, 1 << 16])
def test_maps_are_gpt_neoxs(seed, num_samples, seq_length, piece, monkeypatch):
    monkeypatch.setattr(index_maps, "_PIECE", piece)
    random = np.random.default_rng(seed)
    sizes = (random.integers(0, 40, 60) * random.integers(0, 2, 60)).astype(np.int32)  # many empty documents
    documents = range(seed, 50 + seed)
    maps = build_index_maps(sizes, documents, num_samples=num_samples, seq_length=seq_length, seed=seed)
    found = (maps.document_map, maps.sample_map, maps.shuffle_map)
    for array, expected in zip(found, neox_maps(sizes, documents, num_samples, seq_length, seed), strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_epochs_are_the_fewest_that_give_enough_samples():
    for tokens in (2, 9, 10, 11, 100):
        for samples in range(1, 30):
            epochs = count_epochs(tokens, 10, samples)
            assert (epochs * tokens - 1) // 10 >= samples
            assert epochs == 1 or ((epochs - 1) * tokens - 1) // 10 < samples


def test_documents_without_tokens_are_refused():
    with raises_naming(DataError, "1 to 3"):
        build_index_maps(np.array([5, 0, 0]), range(1, 3), num_samples=1, seq_length=2, seed=0)


def test_the_key_follows_content_and_every_parameter():
    sizes = np.arange(10, dtype=np.int32)
    base = {"num_samples": 4, "seq_length": 8, "seed": 1}
    key = content_key(sizes, range(5), **base)
    assert key == content_key(sizes.copy(), range(5), **base)
    assert key == content_key(np.append(sizes, 3).astype(np.int32), range(5), **base)  # other documents play no part
    others = [
        content_key(sizes, range(5), **{**base, name: value}) for name, value in (("num_samples", 5), ("seed", 2))
    ]
    others += [content_key(sizes + 1, range(5), **base), content_key(sizes, range(1, 6), **base)]
    assert len({key, *others}) == 5


def test_maps_are_built_once_and_read_again(tmp_path):
    calls = []
    build = lambda: calls.append(1) or {"a": np.arange(5), "b": np.ones((2, 2))}  # noqa: E731
    for _ in range(3):
        arrays = load_or_build(tmp_path / "maps", "key", ("a", "b"), build)
        np.testing.assert_array_equal(arrays["a"], np.arange(5))
    assert len(calls) == 1
    assert not list(tmp_path.glob("maps/*.partial"))
    assert len(load_or_build(None, "key", ("a", "b"), build)) == 2
    assert len(calls) == 2


def test_a_damaged_entry_is_built_again(tmp_path, caplog):
    build = lambda: {"a": np.arange(5)}  # noqa: E731
    load_or_build(tmp_path, "key", ("a",), build)
    (tmp_path / "key" / "a.npy").write_bytes(b"\x93NUMPY")
    with caplog.at_level(logging.WARNING, logger="neox"):
        arrays = load_or_build(tmp_path, "key", ("a",), build)
    np.testing.assert_array_equal(arrays["a"], np.arange(5))
    assert "damaged" in caplog.text
    np.testing.assert_array_equal(np.load(tmp_path / "key" / "a.npy"), np.arange(5))


def test_where_nothing_can_be_written_maps_are_built_in_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("not a directory")
    with caplog.at_level(logging.WARNING, logger="neox"):
        arrays = load_or_build(tmp_path / "file", "key", ("a",), lambda: {"a": np.arange(5)})
    assert len(arrays["a"]) == 5
    assert "they stay in memory" in caplog.text


def test_one_asker_builds_for_all_and_a_dead_one_blocks_nobody(tmp_path):
    (tmp_path / "key.lock").touch()  # left by a process that died, and what it had begun
    (tmp_path / "key.abc.partial").mkdir()
    builders = []

    def build():
        builders.append(threading.get_ident())
        time.sleep(0.05)  # so that the others ask meanwhile
        return {"a": np.arange(1000)}

    with ThreadPoolExecutor(4) as pool:  # every asker opens the lock file itself, so threads wait like processes
        results = list(pool.map(lambda _: load_or_build(tmp_path, "key", ("a",), build), range(8)))
    assert len(builders) == 1
    assert all(result["a"][-1] == 999 for result in results)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_without_locks_and_on_a_full_disk(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert len(load_or_build(tmp_path, "key", ("a",), lambda: {"a": np.arange(5)})["a"]) == 5
    assert (tmp_path / "key").is_dir()
    monkeypatch.setattr(np, "save", full)
    calls = []
    with caplog.at_level(logging.WARNING, logger="neox"):
        load_or_build(tmp_path, "other", ("a",), lambda: calls.append(1) or {"a": np.arange(5)})
    assert len(calls) == 1
    assert "No space left" in caplog.text
    assert not list(tmp_path.glob("other*.partial"))
