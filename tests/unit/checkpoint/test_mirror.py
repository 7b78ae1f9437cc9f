"""Copies of checkpoints in a bucket: complete or not there, whatever fails, and the same bytes when they come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from neox.checkpoint import commit, find_checkpoint, keep_last, stage_directory, why_incomplete
from neox.checkpoint.remote.fetching import cached_checkpoint, with_local_load, without_optimizer
from neox.checkpoint.remote.mirror import SUPERSEDED_MANIFEST, Mirror
from neox.engine import SaveReport, TrainState
from neox.errors import CheckpointError
from neox.features.mirror_uploads.run import MirrorUploads
from neox.storage import cache_folder
from tests.errors import raises_naming
from tests.plans import small_plan
from tests.unit.corpus.s3_server import FailingApp, error, s3_server

OPTIMIZER = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
NAMES = ("layer_00.pt", "layer_02.pt", OPTIMIZER)
RUN = "s3://bucket/run"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingApp]:
    monkeypatch.setattr("neox.storage.FIRST_PAUSE", 0.001)
    with s3_server(monkeypatch) as app:
        yield app


def checkpoint(save: Path, iteration: int, size: int = 1000) -> Path:
    staged = stage_directory(save, iteration)
    (staged / "configs").mkdir()
    (staged / "configs" / "run.yml").write_text(f"iteration {iteration}")
    for name in NAMES:
        (staged / name).write_bytes((name + str(iteration)).encode() * (size // 10))
    return commit(staged)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_checkpoint_comes_back_equal_and_old_ones_go(s3: FailingApp, tmp_path: Path) -> None:
    mirror = Mirror(RUN)
    paths = [checkpoint(tmp_path / "save", iteration, size=13_000_000 // iteration) for iteration in (1, 2, 3)]
    for path in paths:
        mirror.upload(path)
    assert mirror.iterations() == [1, 2, 3]
    fetched = cached_checkpoint(RUN, tmp_path / "cache")
    assert contents(fetched) == contents(paths[2])
    requests = len(s3.requests)
    assert cached_checkpoint(f"{RUN}/global_step3/", tmp_path / "cache") == fetched
    assert not any(path.endswith(".pt") for _, path in s3.requests[requests:])
    mirror.keep_last(1)
    assert mirror.iterations() == [3]
    assert not any("global_step1/" in name for name in fsspec.filesystem("s3").find("bucket/run"))
    with raises_naming(CheckpointError, RUN, "[3]"):
        cached_checkpoint(RUN, tmp_path / "cache", 2)


def test_a_server_that_refuses_one_request_in_five(s3: FailingApp, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "save", 7, size=6_000_000)
    s3.fail = lambda number, method, path: error("503 Slow Down", "SlowDown") if number % 5 == 0 else None
    Mirror(RUN).upload(path)
    assert contents(cached_checkpoint(RUN, tmp_path / "cache")) == contents(path)


def test_what_fails_halfway_does_not_count(s3: FailingApp, tmp_path: Path) -> None:
    mirror = Mirror(RUN)
    mirror.upload(checkpoint(tmp_path / "save", 1))
    newer = checkpoint(tmp_path / "save", 2)
    refused = error("400 Bad Request", "ExpiredToken")
    s3.fail = lambda number, method, path: refused if method == "PUT" and path.endswith("layer_02.pt") else None
    with raises_naming(CheckpointError, f"{RUN}/global_step2/layer_02.pt"):
        mirror.upload(newer)
    s3.fail = lambda number, method, path: None
    assert mirror.iterations() == [1]
    assert cached_checkpoint(RUN, tmp_path / "cache").name == "global_step1"
    (newer / "layer_00.pt").write_bytes(b"changed")
    with raises_naming(CheckpointError, newer / "layer_00.pt"):
        mirror.upload(newer)
    assert mirror.iterations() == [1]


def test_damaged_objects_are_named(s3: FailingApp, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "save", 4)
    Mirror(RUN).upload(path)
    where = fsspec.filesystem("s3")
    whole = (path / "layer_00.pt").read_bytes()
    for damaged in (whole[:-1], b"X" + whole[1:]):
        where.pipe_file("bucket/run/global_step4/layer_00.pt", damaged)
        with raises_naming(CheckpointError, f"{RUN}/global_step4/layer_00.pt"):
            cached_checkpoint(RUN, tmp_path / "cache")
        assert not cache_folder(f"{RUN}/global_step4", tmp_path / "cache").exists()
    where.pipe_file("bucket/run/global_step4/layer_00.pt", whole)
    assert contents(cached_checkpoint(RUN, tmp_path / "cache")) == contents(path)


def test_training_does_not_wait_for_uploads(s3: FailingApp, tmp_path: Path) -> None:
    keys = {"save": str(tmp_path / "save"), "checkpoint_mirror": RUN, "keep_last_n_checkpoints": 1}
    uploads = MirrorUploads(small_plan(**keys))
    state = TrainState()
    opened = threading.Event()

    def stall(number: int, method: str, path: str) -> None:
        opened.wait(60)

    s3.fail = stall
    uploads.on_start(state)
    for iteration in (1, 2, 3):
        uploads.on_save(state, SaveReport(checkpoint(tmp_path / "save", iteration), iteration, 0.0, 0.0))
    assert not opened.is_set()  # three saves were reported while the server answered nothing
    opened.set()
    uploads.on_exit()
    assert Mirror(RUN).iterations() == [3]
    s3.fail = lambda number, method, path: error("403 Forbidden", "ExpiredToken")
    broken = MirrorUploads(small_plan(**keys))
    state.iteration = 4
    checkpoint(tmp_path / "save", 4)
    broken.on_start(state)
    broken.on_exit()
    s3.fail = lambda number, method, path: None
    assert Mirror(RUN).iterations() == [3]
    resumed = MirrorUploads(small_plan(**keys))
    resumed.on_start(state)
    resumed.on_exit()
    assert Mirror(RUN).iterations() == [4]


def test_a_copy_of_weights_grows_to_a_whole_one(s3: FailingApp, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "save", 3)
    Mirror(RUN).upload(path)
    weights = cached_checkpoint(RUN, tmp_path / "cache", needed=without_optimizer)
    assert OPTIMIZER not in contents(weights)
    assert why_incomplete(weights) == []
    requests = len(s3.requests)
    assert contents(cached_checkpoint(RUN, tmp_path / "cache")) == contents(path)
    fetched = {path.rpartition("/")[2] for method, path in s3.requests[requests:] if method == "GET"}
    assert not any(name.startswith("layer_") for name in fetched)
    assert contents(cached_checkpoint(RUN, tmp_path / "cache", needed=without_optimizer)) == contents(path)


def test_another_run_at_the_same_address_is_refused(s3: FailingApp, tmp_path: Path) -> None:
    Mirror(RUN).upload(checkpoint(tmp_path / "one", 3))
    copy = cached_checkpoint(RUN, tmp_path / "cache")
    Mirror(RUN).upload(checkpoint(tmp_path / "two", 3, size=500))
    with raises_naming(CheckpointError, copy, RUN):
        cached_checkpoint(RUN, tmp_path / "cache")


def test_a_run_whose_load_is_its_mirror_goes_on_in_save(s3: FailingApp, tmp_path: Path) -> None:
    save = tmp_path / "new-host"
    keys = {"save": str(save), "load": RUN, "checkpoint_mirror": f"{RUN}/"}
    first = with_local_load(small_plan(**keys).config, trains=True)
    assert first.checkpoint.load == str(save)
    assert not save.exists()
    paths = [checkpoint(tmp_path / "old-host", iteration) for iteration in (1, 2)]
    for path in paths:
        Mirror(RUN).upload(path)
    moved = with_local_load(small_plan(**keys).config, trains=True)
    assert moved.checkpoint.load == str(save)
    assert contents(save / "global_step2") == contents(paths[1])
    newer = checkpoint(save, 3)
    requests = len(s3.requests)
    with_local_load(small_plan(**keys).config, trains=True)
    assert find_checkpoint(save) == newer
    assert not any(path.endswith(".pt") for _, path in s3.requests[requests:])


def test_a_checkpoint_is_not_pruned_while_it_is_uploaded(s3: FailingApp, tmp_path: Path) -> None:
    save = tmp_path / "save"
    uploads = MirrorUploads(small_plan(save=str(save), checkpoint_mirror=RUN, keep_last_n_checkpoints=1))
    state = TrainState()
    reached = threading.Event()
    opened = threading.Event()

    def stall(number: int, method: str, path: str) -> None:
        if method == "PUT" and path.endswith("layer_02.pt"):
            reached.set()
            opened.wait(60)

    s3.fail = stall
    uploads.on_start(state)
    first = checkpoint(save, 1)
    uploads.on_save(state, SaveReport(first, 1, 0.0, 0.0))
    assert reached.wait(60)
    second = checkpoint(save, 2)
    assert keep_last(save, 1) == []
    assert first.is_dir()
    uploads.on_save(state, SaveReport(second, 2, 0.0, 0.0))
    opened.set()
    uploads.on_exit()
    assert sorted(save.glob("global_step*")) == [second]
    assert Mirror(RUN).iterations() == [2]
    puts = [path for method, path in s3.requests if method == "PUT"]
    assert "/bucket/run/global_step1/manifest.json" in puts  # it was complete before the newer one came


def test_nothing_goes_from_the_mirror_before_a_newer_checkpoint_is_complete(s3: FailingApp, tmp_path: Path) -> None:
    save = tmp_path / "save"
    uploads = MirrorUploads(small_plan(save=str(save), checkpoint_mirror=RUN, keep_last_n_checkpoints=1))
    state = TrainState()
    first = checkpoint(save, 1)
    Mirror(RUN).upload(first)
    saved = contents(first)
    full = error("403 Forbidden", "QuotaExceeded")
    manifest = "/bucket/run/global_step2/manifest.json"
    s3.fail = lambda number, method, path: full if method == "PUT" and path == manifest else None
    uploads.on_start(state)
    uploads.on_save(state, SaveReport(checkpoint(save, 2), 2, 0.0, 0.0))
    uploads.on_exit()
    assert any(request == ("PUT", manifest) for request in s3.requests)
    assert Mirror(RUN).iterations() == [1]
    assert contents(cached_checkpoint(RUN, tmp_path / "cache")) == saved
    s3.fail = lambda number, method, path: None
    s3.requests.clear()
    state.iteration = 2
    resumed = MirrorUploads(small_plan(save=str(save), checkpoint_mirror=RUN, keep_last_n_checkpoints=1))
    resumed.on_start(state)
    resumed.on_exit()
    assert Mirror(RUN).iterations() == [2]
    committed = s3.requests.index(("PUT", manifest))
    deletions = [number for number, (method, path) in enumerate(s3.requests) if _deletes(method, path)]
    assert deletions
    assert min(deletions) > committed


def _deletes(method: str, path: str) -> bool:
    return method == "DELETE" or (method == "POST" and path.rstrip("/") == "/bucket")


def test_an_upload_that_does_not_move_ends_at_its_deadline(
    s3: FailingApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neox.features.mirror_uploads.run._DEADLINE_SECONDS", 0.5)
    uploads = MirrorUploads(small_plan(save=str(tmp_path), checkpoint_mirror=RUN))
    opened = threading.Event()
    reached = threading.Event()

    def stall(number: int, method: str, path: str) -> None:
        if method == "PUT":
            reached.set()
            opened.wait(300)

    s3.fail = stall
    state = TrainState()
    uploads.on_start(state)
    path = checkpoint(tmp_path, 1)
    uploads.on_save(state, SaveReport(path, 1, 0.0, 0.0))
    assert reached.wait(60)
    uploads.on_exit()  # while the server answers nothing
    assert not opened.is_set()
    assert path.is_dir()
    opened.set()


def test_a_run_that_goes_back_supersedes_what_is_later_in_the_mirror(s3: FailingApp, tmp_path: Path) -> None:
    mirror = Mirror(RUN)
    for iteration in (2, 8, 9):
        mirror.upload(checkpoint(tmp_path / "before", iteration))
    save = tmp_path / "save"
    uploads = MirrorUploads(small_plan(save=str(save), checkpoint_mirror=RUN, keep_last_n_checkpoints=1))
    state = TrainState()
    state.iteration = 2
    checkpoint(save, 2)
    uploads.on_start(state)
    uploads.on_save(state, SaveReport(checkpoint(save, 3), 3, 0.0, 0.0))
    uploads.on_exit()
    assert mirror.iterations() == [3]
    assert cached_checkpoint(RUN, tmp_path / "cache").name == "global_step3"
    kept = fsspec.filesystem("s3").find("bucket/run/global_step9")
    assert {name.rpartition("/")[2] for name in kept} == {*NAMES, "run.yml", SUPERSEDED_MANIFEST}


@pytest.mark.parametrize(("before", "counting"), [((8,), [8]), ((2, 8), [2])])
def test_a_mirror_never_lacks_a_complete_checkpoint(
    s3: FailingApp, tmp_path: Path, before: tuple[int, ...], counting: list[int]
) -> None:
    """A run goes back to step 3, and its first upload fails: later checkpoints count only if there are no others."""
    mirror = Mirror(RUN)
    for iteration in before:
        mirror.upload(checkpoint(tmp_path / "before", iteration))
    save = tmp_path / "save"
    state = TrainState()
    state.iteration = 3
    checkpoint(save, 3)

    s3.fail = lambda number, method, path: error("403 Forbidden", "Expired") if "layer_02.pt" in path else None
    for expected in (counting, [3]):
        uploads = MirrorUploads(small_plan(save=str(save), checkpoint_mirror=RUN, keep_last_n_checkpoints=1))
        uploads.on_start(state)
        uploads.on_exit()
        assert mirror.iterations() == expected
        s3.fail = lambda number, method, path: None


def test_uploads_that_are_killed_leave_nothing_half_committed(s3: FailingApp, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "save", 5)
    imports = "from pathlib import Path\nfrom neox.checkpoint.remote.mirror import Mirror\n"
    program = f"{imports}Mirror({RUN!r}).upload(Path({str(path)!r}))"
    reached: list[str] = []

    def stall(number: int, method: str, path: str) -> None:
        if method == "PUT" and path.endswith("layer_02.pt"):
            reached.append(path)
            time.sleep(20)

    s3.fail = stall
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    upload = subprocess.Popen([sys.executable, "-c", program], env=environment, cwd=ROOT)
    deadline = time.monotonic() + 120
    while not reached and time.monotonic() < deadline and upload.poll() is None:
        time.sleep(0.05)
    assert reached
    upload.send_signal(signal.SIGKILL)
    upload.wait()
    s3.fail = lambda number, method, path: None
    mirror = Mirror(RUN)
    assert mirror.iterations() == []
    mirror.upload(path)
    assert contents(cached_checkpoint(RUN, tmp_path / "cache")) == contents(path)
