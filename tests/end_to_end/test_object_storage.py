"""Whole runs whose data and checkpoints are in a bucket of a server that refuses one request in five."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from neox.checkpoint import compare_checkpoints, open_checkpoint
from neox.checkpoint.remote.mirror import Mirror
from tests.end_to_end.launched_runs import CPU_ONLY, ROOT, LaunchedRun
from tests.unit.corpus.s3_server import FailingApp, error, s3_server

DATA = ROOT / "tests" / "golden" / "data" / "small_text_document"
RUN = "s3://bucket/run"
SETTINGS = (
    "train_iters=6",
    "lr_decay_iters=6",
    "log_interval=1",
    "zero_optimization.stage=1",
    "data_path=s3://bucket/t",
)
OTHER_DEGREES = ("model_parallel_size=2",)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingApp]:
    with s3_server(monkeypatch) as app:
        where = fsspec.filesystem("s3")
        for suffix in (".bin", ".idx"):
            where.pipe_file(f"bucket/t{suffix}", Path(f"{DATA}{suffix}").read_bytes())
        app.fail = lambda number, method, path: error("503 Slow Down", "SlowDown") if number % 5 == 0 else None
        yield app


def train(directory: Path, runs: list[LaunchedRun], *settings: str, status: int = 0) -> str:
    """Run `deepy.py train.py` on two ranks to its end, and return what it printed."""
    cache = (f"checkpoint_cache_dir={directory / 'fetched'}", f"data_cache_dir={directory / 'data'}")
    arguments = []
    for setting in (*SETTINGS, *cache, *settings):
        arguments += ["--set", setting]
    run = LaunchedRun(directory, arguments, script=None)
    runs.append(run)
    output = run.output(900)
    assert run.process.returncode == status, output
    return output


def tool(directory: Path, name: str, *arguments: str) -> str:
    """Run a tool to its end, and return what it printed."""
    command = [sys.executable, str(ROOT / "tools" / name), *arguments]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_run_goes_on_at_other_degrees_from_a_bucket(
    s3: FailingApp, tmp_path: Path, runs: list[LaunchedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CPU_ONLY.items():
        monkeypatch.setenv(name, value)
    save = tmp_path / "save"
    train(tmp_path, runs, f"save={save}", f"checkpoint_mirror={RUN}", "checkpoint_factor=3", "exit_interval=3")
    s3.fail = lambda number, method, path: error("503 Slow Down", "SlowDown") if number % 5 == 1 else None
    assert Mirror(RUN).iterations() == [3]
    local = tmp_path / "local"
    fetched = tmp_path / "remote"
    train(tmp_path, runs, *OTHER_DEGREES, f"load={save}", f"save={local}")
    shutil.rmtree(save)
    train(tmp_path, runs, *OTHER_DEGREES, f"load={RUN}", f"save={fetched}")
    readers = [open_checkpoint(path / "global_step6") for path in (local, fetched)]
    assert list(compare_checkpoints(*readers)) == []
    assert list((tmp_path / "fetched" / "s3" / "bucket" / "run" / "global_step3").glob("*optim_states.pt"))

    train(tmp_path, runs, f"save={save}", f"load={RUN}", f"checkpoint_mirror={RUN}")  # hosts without the old disk
    assert Mirror(RUN).iterations() == [3, 6]

    seen = json.loads(tool(tmp_path, "inspect_checkpoint.py", f"{RUN}/global_step6", "--json"))
    assert seen["iteration"] == 6
    assert seen["problems"] == []
    cache = ("--cache-dir", str(tmp_path / "weights"))
    tool(tmp_path, "reshard.py", "--input_dir", RUN, *cache, "--output_dir", "resharded", "--model-parallel-size", "2")
    compared = json.loads(tool(tmp_path, "inspect_checkpoint.py", f"{RUN}/global_step6", "resharded", "--json", *cache))
    assert compared["tensors"] == []
    assert not list((tmp_path / "weights").rglob("*optim_states.pt"))
    tool(tmp_path, "convert_to_hf.py", "--input_dir", RUN, *cache, "--output_dir", "hf", "--no-verify")
    assert (tmp_path / "hf" / "config.json").is_file()

    where = fsspec.filesystem("s3")
    (name,) = (
        path for path in where.find("bucket/run/global_step6") if path.endswith("layer_02-model_00-model_states.pt")
    )
    whole = where.cat_file(name)
    for damaged in (whole[:-1], bytes([whole[0] ^ 1]) + whole[1:]):
        where.pipe_file(name, damaged)
        shutil.rmtree(tmp_path / "fetched")
        assert name in train(tmp_path, runs, f"load={RUN}", "finetune=true", status=1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_run_whose_save_is_an_address_goes_on_after_its_host_is_lost(
    s3: FailingApp, tmp_path: Path, runs: list[LaunchedRun]
) -> None:
    kept = ("checkpoint_factor=2", "keep_last_n_checkpoints=1")  # each start has a directory of its own

    def saved() -> Path:
        return runs[-1].directory / "runs" / "saved" / "s3" / "bucket" / "run"

    train(tmp_path, runs, f"save={RUN}", "exit_interval=4", *kept)
    assert Mirror(RUN).iterations() == [4]
    assert "seed" in train(tmp_path, runs, f"save={RUN}", "seed=7", status=2)
    assert not saved().exists()
    train(tmp_path, runs, f"save={RUN}", *kept)
    assert Mirror(RUN).iterations() == [6]
    resumed = saved()
    whole = tmp_path / "whole"
    train(tmp_path, runs, f"save={whole}", "data_cache_gb=0.01", f"data_cache_dir={tmp_path / 'index'}", *kept)
    readers = [open_checkpoint(path / "global_step6") for path in (whole, resumed)]
    assert list(compare_checkpoints(*readers)) == []
    train(tmp_path, runs, f"save={RUN}", "seed=7", "overwrite=true", "exit_interval=2", *kept)
    assert Mirror(RUN).iterations() == [2]
