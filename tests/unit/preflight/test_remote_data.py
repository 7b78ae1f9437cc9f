"""Token files at addresses: copied once, again if they change, and refused if the disk is too small."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from neox.data import IndexedDataset, IndexedDatasetBuilder
from neox.errors import DataError
from neox.preflight.remote_data import with_local_data
from tests.errors import raises_naming
from tests.plans import small_plan
from tests.unit.corpus.s3_server import FailingApp, s3_server


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingApp]:
    monkeypatch.setattr("neox.storage.FIRST_PAUSE", 0.001)
    with s3_server(monkeypatch) as app:
        yield app


def upload(folder: Path, tokens: list[int]) -> None:
    with IndexedDatasetBuilder(str(folder / "t"), np.dtype(np.uint16)) as builder:
        builder.add_documents(np.array(tokens, np.uint16), np.array([len(tokens)], np.int32))
    for suffix in (".bin", ".idx"):
        fsspec.filesystem("s3").pipe_file(f"bucket/t{suffix}", (folder / f"t{suffix}").read_bytes())
        os.unlink(folder / f"t{suffix}")


def test_token_files_are_copied_once_and_again_if_they_change(s3: FailingApp, tmp_path: Path, monkeypatch) -> None:
    keys = {"train_data_paths": ["s3://bucket/t", "local/t"], "valid_data_paths": {"a": "s3://bucket/t"}}
    config = small_plan(**keys, data_cache_dir=str(tmp_path / "cache")).config
    upload(tmp_path, [1, 2, 3])
    local = with_local_data(config)
    assert local.data.train_data_paths is not None
    copied, kept = local.data.train_data_paths
    assert kept == "local/t"
    assert IndexedDataset(copied)[0].tolist() == [1, 2, 3]
    requests = len(s3.requests)
    assert with_local_data(config) == local
    assert not any(method == "GET" and path.endswith(".bin") for method, path in s3.requests[requests:])
    upload(tmp_path, [4, 5, 6])
    fsspec.filesystem("s3").invalidate_cache()
    with_local_data(config)
    assert IndexedDataset(copied)[0].tolist() == [4, 5, 6]
    fsspec.filesystem("s3").rm_file("bucket/t.idx")
    fsspec.filesystem("s3").invalidate_cache()
    with raises_naming(DataError, "s3://bucket/t.idx"):
        with_local_data(config)


def test_a_disk_that_is_too_small_is_refused(s3: FailingApp, tmp_path: Path, monkeypatch) -> None:
    upload(tmp_path, [1, 2, 3])
    usage = namedtuple("usage", "free")(3)
    monkeypatch.setattr("neox.preflight.remote_data.shutil.disk_usage", lambda path: usage)
    with raises_naming(DataError, "s3://bucket/t", "data_cache_dir"):
        with_local_data(small_plan(data_path="s3://bucket/t", data_cache_dir=str(tmp_path / "cache")).config)
