"""Ranks of one host that read a token file in object storage, and one that is killed while it fetches."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import fsspec
import numpy as np
import pytest

from neox.data.token_files.remote_blocks import BLOCK_BYTES, RemoteTokens
from neox.storage import RemoteIds
from tests.unit.corpus.s3_server import FailingApp, s3_server

BLOCKS = 6
RANKS = 4


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingApp]:
    with s3_server(monkeypatch) as app:
        fsspec.filesystem("s3").pipe_file("bucket/t.bin", token_ids().tobytes())
        yield app


def token_ids() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 60_000, BLOCKS * BLOCK_BYTES // 2 - 77).astype(np.uint16)


def description(directory: Path) -> RemoteIds:
    size = token_ids().nbytes
    return RemoteIds("s3://bucket/t.bin", size, "1", size, str(directory / "a-1"), None)


def read(directory: Path, seed: int, ready: Barrier | None) -> None:
    """Read everything in an order of the rank's own; an assertion shows in the exit code."""
    ids = token_ids()
    tokens = RemoteTokens(description(directory), ids.dtype)
    if ready is not None:
        ready.wait(200)
    begins = np.arange(0, len(ids), 50_000)
    np.random.default_rng(seed).shuffle(begins)
    for begin in begins.tolist():
        assert np.array_equal(tokens[begin : begin + 50_000], ids[begin : begin + 50_000])


@pytest.mark.slow
def test_ranks_of_a_host_download_a_block_once_and_survive_a_killed_one(s3: FailingApp, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")

    def stall(number: int, method: str, path: str) -> None:
        if method == "GET":
            time.sleep(1)

    s3.fail = stall
    killed = context.Process(target=read, args=(tmp_path, 9, None))
    killed.start()
    assert killed.pid is not None
    deadline = time.monotonic() + 200
    while transfers(s3) < 3 and time.monotonic() < deadline:  # some blocks are here, another is on its way
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    there = RemoteTokens(description(tmp_path), np.dtype(np.uint16)).file.stored_bytes // BLOCK_BYTES
    assert 1 <= there < BLOCKS
    s3.fail = lambda number, method, path: None
    before = transfers(s3)
    ready = context.Barrier(RANKS)
    ranks = [context.Process(target=read, args=(tmp_path, seed, ready)) for seed in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(250)
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    assert transfers(s3) - before == BLOCKS - there


def transfers(app: FailingApp) -> int:
    return sum(method == "GET" and path.endswith("t.bin") for method, path in app.requests)
