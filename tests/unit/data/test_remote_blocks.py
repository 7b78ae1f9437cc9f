"""Token files in object storage that are read by blocks: the same ids, fetched once, in bounded space."""

from __future__ import annotations

import json
import os
import socket
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from neox.config import NeoXConfig, apply_decisions
from neox.data import IndexedDataset, IndexedDatasetBuilder
from neox.data.samples.gpt_dataset import GPTDataset
from neox.data.token_files.crc import CrcJoiner
from neox.data.token_files.remote_blocks import BlockFile, RemoteTokens
from neox.errors import DataError
from neox.preflight.remote_data import fetch_data, planned_data
from neox.storage import RemoteIds, ids_file
from tests.errors import raises_naming
from tests.plans import small_plan
from tests.unit.corpus.s3_server import FailingApp, error, s3_server

BLOCK = 4096
ADDRESS = "s3://bucket/t"
IDS = np.random.default_rng(3).integers(0, 60, 100_000).astype(np.uint16)
BYTES = IDS.tobytes()
BLOCKS = -(-len(BYTES) // BLOCK)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FailingApp]:
    monkeypatch.setattr("neox.storage.FIRST_PAUSE", 0.001)
    monkeypatch.setattr("neox.data.token_files.remote_blocks.BLOCK_BYTES", BLOCK)
    with s3_server(monkeypatch) as app:
        fsspec.filesystem("s3").pipe_file("bucket/t.bin", BYTES)
        yield app


def described(directory: Path, blocks: int = BLOCKS, crc32: int | None = zlib.crc32(BYTES)) -> RemoteIds:
    return RemoteIds(f"{ADDRESS}.bin", len(BYTES), "1", blocks * BLOCK, str(directory / "a-1"), crc32)


def transfers(app: FailingApp) -> int:
    return sum(method == "GET" and path.endswith("t.bin") for method, path in app.requests)


def test_checksums_of_blocks_join_to_that_of_the_file() -> None:
    parts = [BYTES[start : start + 999] for start in range(0, len(BYTES), 999)]
    crcs = [zlib.crc32(part) for part in parts]
    assert CrcJoiner(999).join(crcs[:-1], crcs[-1], len(parts[-1])) == zlib.crc32(BYTES)
    assert CrcJoiner(BLOCK).join([], zlib.crc32(b"abc"), 3) == zlib.crc32(b"abc")


def test_batches_are_those_of_local_files(s3: FailingApp, tmp_path: Path) -> None:
    sizes = np.random.default_rng(4).multinomial(len(IDS), np.full(300, 1 / 300)).astype(np.int32)
    with IndexedDatasetBuilder(str(tmp_path / "t"), np.dtype(np.uint16)) as builder:
        builder.add_documents(IDS, sizes)
    for suffix in (".bin", ".idx"):
        fsspec.filesystem("s3").pipe_file(f"bucket/t{suffix}", (tmp_path / f"t{suffix}").read_bytes())
    keys: dict[str, Any] = {"data_path": ADDRESS, "data_cache_dir": str(tmp_path / "cache")}
    for blocks in (BLOCKS, 30):
        config = small_plan(**keys, data_cache_gb=blocks * BLOCK / 1e9).config
        prefix = with_local_data(config).data.data_path
        assert prefix is not None
        assert ids_file(prefix).suffix == ".json"
        read = []
        for name in (str(tmp_path / "t"), prefix):
            indexed = IndexedDataset(name)
            dataset = GPTDataset(indexed, range(len(indexed)), 700, 127, 5, None)
            read.append(np.concatenate([dataset.read(range(first, first + 8)) for first in range(0, 160, 8)]))
        assert np.array_equal(*read)
    assert len(IndexedDataset(prefix)[7]) == sizes[7]


def test_a_host_downloads_a_block_once(s3: FailingApp, tmp_path: Path) -> None:
    wrong = Counter[str]()

    def read(seed: int) -> None:
        tokens = RemoteTokens(described(tmp_path), IDS.dtype)  # as another rank: files and locks of its own
        for begin in np.random.default_rng(seed).integers(0, len(IDS) - 3000, 40).tolist():
            if not np.array_equal(tokens[begin : begin + 3000], IDS[begin : begin + 3000]):
                wrong["slice"] += 1
        if not np.array_equal(tokens[:], IDS):
            wrong["file"] += 1

    ranks = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert not wrong
    assert transfers(s3) == BLOCKS
    assert np.array_equal(RemoteTokens(described(tmp_path), IDS.dtype)[5:5], IDS[:0])
    assert transfers(s3) == BLOCKS


def test_space_is_bounded_and_what_was_read_last_stays(s3: FailingApp, tmp_path: Path) -> None:
    most = 8
    tokens = RemoteTokens(described(tmp_path, most), IDS.dtype)
    width = BLOCK // IDS.itemsize
    for block in range(BLOCKS):
        assert np.array_equal(tokens[block * width : (block + 1) * width], IDS[block * width : (block + 1) * width])
        assert np.array_equal(tokens[:9], IDS[:9])  # the first block is read all the time
        assert tokens.file.stored_bytes <= most * BLOCK
    assert transfers(s3) == BLOCKS
    on_disk = os.stat(tmp_path / "a-1" / socket.gethostname() / "blocks").st_blocks * 512
    assert on_disk <= (most + 1) * BLOCK


def test_ranks_that_drop_blocks_of_each_other_read_the_same(s3: FailingApp, tmp_path: Path) -> None:
    wrong: list[int] = []

    def read(seed: int) -> None:
        tokens = RemoteTokens(described(tmp_path, 6), IDS.dtype)
        for begin in np.random.default_rng(seed).integers(0, len(IDS) - 900, 60).tolist():
            if not np.array_equal(tokens.joined([begin, 5], [begin + 900, 7]), [*IDS[begin : begin + 900], *IDS[5:7]]):
                wrong.append(begin)

    ranks = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert wrong == []


def test_a_limit_that_is_smaller_than_a_batch_only_costs_time(s3: FailingApp, tmp_path: Path) -> None:
    tokens = RemoteTokens(described(tmp_path, 2), IDS.dtype)
    begins = list(range(0, 40_000, 8_000))
    for _ in range(2):
        read = tokens.joined(begins, [begin + 9 for begin in begins])
        assert np.array_equal(read, np.concatenate([IDS[begin : begin + 9] for begin in begins]))
    tokens[:9]
    assert tokens.file.stored_bytes <= 2 * BLOCK


def test_a_limit_of_the_size_drops_nothing(s3: FailingApp, tmp_path: Path) -> None:
    ids = replace(described(tmp_path), limit=len(BYTES))
    for _ in range(2):
        assert np.array_equal(RemoteTokens(ids, IDS.dtype)[:], IDS)
    assert transfers(s3) == BLOCKS


def test_a_rank_that_is_killed_leaves_no_half_of_a_block(
    s3: FailingApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("os.fdatasync", die)
        with pytest.raises(KeyboardInterrupt):
            RemoteTokens(described(tmp_path), IDS.dtype)[:5]
    file = BlockFile(described(tmp_path))
    assert file.stored_bytes == 0
    assert np.array_equal(RemoteTokens(described(tmp_path), IDS.dtype)[:5], IDS[:5])


def test_a_server_that_refuses_one_request_in_five_is_asked_again(s3: FailingApp, tmp_path: Path) -> None:
    s3.fail = lambda number, method, path: error("503 Slow Down", "SlowDown") if number % 5 == 0 else None
    assert np.array_equal(RemoteTokens(described(tmp_path), IDS.dtype)[:], IDS)


def test_an_expired_token_is_named(s3: FailingApp, tmp_path: Path) -> None:
    s3.fail = lambda number, method, path: error("400 Bad Request", "ExpiredToken")
    with raises_naming(DataError, f"{ADDRESS}.bin", "credentials"):
        RemoteTokens(described(tmp_path), IDS.dtype)[:5]
    s3.fail = lambda number, method, path: None
    assert np.array_equal(RemoteTokens(described(tmp_path), IDS.dtype)[:5], IDS[:5])


def test_damaged_objects_are_named(s3: FailingApp, tmp_path: Path) -> None:
    where = fsspec.filesystem("s3")
    where.pipe_file("bucket/t.bin", BYTES[:-100])
    with raises_naming(DataError, f"{ADDRESS}.bin"):
        RemoteTokens(described(tmp_path), IDS.dtype)[:]
    where.pipe_file("bucket/t.bin", b"X" + BYTES[1:])
    damaged = described(tmp_path / "other")
    for _ in range(2):  # nothing of it is kept
        with raises_naming(DataError, f"{ADDRESS}.bin"):
            RemoteTokens(damaged, IDS.dtype)[:]
    where.pipe_file("bucket/t.bin", BYTES)
    assert np.array_equal(RemoteTokens(damaged, IDS.dtype)[:], IDS)


def test_a_file_that_is_replaced_while_it_is_read_is_named(s3: FailingApp, tmp_path: Path) -> None:
    tokens = RemoteTokens(described(tmp_path, 2, None), IDS.dtype)
    for begin in range(0, len(IDS), 2000):
        assert np.array_equal(tokens[begin : begin + 9], IDS[begin : begin + 9])
    fsspec.filesystem("s3").pipe_file("bucket/t.bin", bytes(len(BYTES)))
    with raises_naming(DataError, f"{ADDRESS}.bin"):
        tokens[:9]
    newer = replace(described(tmp_path, crc32=None), version="2", directory=str(tmp_path / "a-2"))
    assert not RemoteTokens(newer, IDS.dtype)[:9].any()
    assert not (tmp_path / "a-1").exists()


def test_a_plan_says_how_much_disk_blocks_take(s3: FailingApp, tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "t"), np.dtype(np.uint16)) as builder:
        builder.add_documents(IDS, [len(IDS)])
    for suffix in (".bin", ".idx"):
        fsspec.filesystem("s3").pipe_file(f"bucket/t{suffix}", (tmp_path / f"t{suffix}").read_bytes())
    (tmp_path / "t.json").write_text(json.dumps({"crc32": 7}))
    fsspec.filesystem("s3").put_file(str(tmp_path / "t.json"), "bucket/t.json")
    keys: dict[str, Any] = {"data_path": ADDRESS, "data_cache_dir": str(tmp_path / "cache")}
    blocks = tmp_path / "disk"
    config = small_plan(**keys, data_cache_gb=50_000 / 1e9, data_block_dir=str(blocks)).config
    planned = planned_data(config)
    assert apply_decisions(config, planned.decisions).data.data_path == ADDRESS
    assert any(f"{len(BYTES):,}" in note and "50,000" in note and str(blocks) in note for note in planned.notes)
    assert not (tmp_path / "cache").exists()
    local = with_local_data(config)
    assert transfers(s3) == 0
    assert RemoteIds.read(ids_file(str(local.data.data_path))).crc32 == 7
    assert apply_decisions(config, planned_data(config).decisions) == local
    s3.requests.clear()
    copied = with_local_data(small_plan(**keys).config)  # now whole
    assert transfers(s3) > 0
    assert with_local_data(config).data == replace_data(copied.data, config.data)
    assert ids_file(str(copied.data.data_path)).suffix == ".bin"
    large = small_plan(**keys, data_cache_gb=1e9, data_block_dir=str(blocks)).config
    assert apply_decisions(large, planned_data(large).decisions).data.data_path == copied.data.data_path


def with_local_data(config: NeoXConfig) -> NeoXConfig:
    return apply_decisions(config, fetch_data(config).decisions)


def replace_data(data: Any, keys: Any) -> Any:
    """The data section with the keys of the blocks of another one."""
    return data.model_copy(update={"data_cache_gb": keys.data_cache_gb, "data_block_dir": keys.data_block_dir})
