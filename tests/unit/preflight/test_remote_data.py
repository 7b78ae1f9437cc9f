"""Token files at addresses: copied once, again if they change, and refused if the disk is too small."""

from __future__ import annotations

import json
import os
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from neox.checkpoint import commit, stage_directory
from neox.checkpoint.remote.mirror import Mirror
from neox.config import NeoXConfig, apply_decisions
from neox.data import IndexedDataset, IndexedDatasetBuilder
from neox.errors import DataError
from neox.launch.hosts.placement import choose_hosts
from neox.plan import Capabilities
from neox.plan.run_identity import run_identity
from neox.preflight.command_line import find_script, parse_arguments
from neox.preflight.planning import Job, PlannedJob, plan_job, read_config
from neox.preflight.remote_checkpoints import with_local_load
from neox.preflight.remote_data import fetch_data
from tests.errors import raises_naming
from tests.plans import SIZES, small_plan
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


def with_local_data(config: NeoXConfig) -> NeoXConfig:
    return apply_decisions(config, fetch_data(config).decisions)


def planned(tmp_path: Path, **keys: Any) -> PlannedJob:
    """The plan of a dry run."""
    file = tmp_path / "run.yml"
    file.write_text(json.dumps({**SIZES, "data_cache_dir": str(tmp_path / "data"), **keys}))
    arguments = parse_arguments(["train.py", str(file), "--dry-run", "--hosts", "1", "--gpus", "1"])
    config = read_config(arguments)
    placement, _ = choose_hosts(config, arguments)
    return plan_job(config, Job(find_script("train.py"), placement, dry_run=True), Capabilities(), is_sound=True)


def keys_of(job: PlannedJob) -> set[str]:
    return {key for problem in job.problems for key in problem.keys}


def test_a_dry_run_says_what_a_start_would_copy_and_copies_nothing(s3: FailingApp, tmp_path: Path) -> None:
    upload(tmp_path, [1, 2, 3])
    size = sum(fsspec.filesystem("s3").size(f"bucket/t{suffix}") for suffix in (".bin", ".idx"))
    job = planned(tmp_path, data_path="s3://bucket/t")
    assert any("s3://bucket/t" in note and f" {size} " in note for note in job.notes)
    assert not keys_of(job) & {"data_path"}
    assert not (tmp_path / "data").exists()
    assert not any(method == "GET" and path.endswith((".bin", ".idx")) for method, path in s3.requests)
    copied = with_local_data(small_plan(data_path="s3://bucket/t", data_cache_dir=str(tmp_path / "data")).config)
    again = planned(tmp_path, data_path="s3://bucket/t")
    assert again.plan.config.data.data_path == copied.data.data_path
    assert not any("s3://bucket/t" in note for note in again.notes)
    missing = planned(tmp_path, data_path="s3://bucket/none")
    assert any("s3://bucket/none.bin" in str(problem) for problem in missing.problems)


def test_a_dry_run_fetches_no_checkpoint(s3: FailingApp, tmp_path: Path) -> None:
    keys = {"load": "s3://bucket/run", "checkpoint_cache_dir": str(tmp_path / "cache")}
    assert "load" in keys_of(planned(tmp_path, **keys))  # there is none
    staged = stage_directory(tmp_path / "save", 3)
    (staged / "layer_00-model_00-model_states.pt").write_bytes(b"x" * 70_000)
    (staged / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"x" * 100_000)
    Mirror("s3://bucket/run").upload(commit(staged))
    for size, more in ((170_000, {}), (70_000, {"finetune": True})):
        job = planned(tmp_path, **keys, **more)
        assert "load" not in keys_of(job)
        assert any("s3://bucket/run/global_step3" in note and f" {size:,} bytes" in note for note in job.notes)
    assert not (tmp_path / "cache").exists()
    assert not any(method == "GET" and path.endswith(".pt") for method, path in s3.requests)
    real = with_local_load(NeoXConfig.from_flat({**SIZES, **keys}), trains=True)
    dry = NeoXConfig.from_flat({**SIZES, **keys})
    assert run_identity(dry) == run_identity(real)  # so that a dry run knows whether `save` holds this run


def test_a_disk_that_is_too_small_is_refused(s3: FailingApp, tmp_path: Path, monkeypatch) -> None:
    upload(tmp_path, [1, 2, 3])
    usage = namedtuple("usage", "free")(3)
    monkeypatch.setattr("neox.preflight.remote_data.shutil.disk_usage", lambda path: usage)
    with raises_naming(DataError, "s3://bucket/t", "data_cache_dir"):
        with_local_data(small_plan(data_path="s3://bucket/t", data_cache_dir=str(tmp_path / "cache")).config)
