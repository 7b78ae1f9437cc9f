"""Trackers that fail, come back or stay away: training goes on, and rows arrive once and in order."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

from neox.engine import StepReport, StepResult, TrainState
from neox.features.trackers.comet import Comet
from neox.features.trackers.journal import QueuedTracker
from neox.features.trackers.mlflow import MLflow
from neox.features.trackers.trackio import Trackio
from tests.plans import small_plan


class Server:
    """A tracker's server: what it holds, and how often it refuses."""

    def __init__(self, refusals: float = 0) -> None:
        self.refusals = refusals
        self.rows: list[tuple[int, float]] = []
        self.runs: list[str] = []
        self.closed: list[bool] = []

    def answer(self) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            raise ConnectionError("no server there")


class Sent(QueuedTracker):
    """Tracker of such a server."""

    name = "sent"
    server: Server

    def connect(self, *, is_resumed: bool) -> None:
        self.server.answer()
        self.server.runs.append(self.run_id)

    def send(self, rows):
        self.server.answer()
        self.server.rows += [(row.iteration, row.scalars["train/lm_loss"]) for row in rows]

    def close(self, *, failed: bool) -> None:
        self.server.closed.append(failed)


def report(loss: float) -> StepReport:
    result = StepResult({"lm_loss": loss}, grad_norm=1.25, loss_scale=1.0, lr=1e-3, update_skipped=False)
    return StepReport(result, seconds=0.5, samples=8, seq_length=256, flops=5e11, reading=0.01)


def run(tracker, losses, *, resumed_from=0, failed=False):
    state = TrainState(iteration=resumed_from)
    tracker.on_start(state)
    for loss in losses:
        state.iteration += 1
        tracker.on_step(state, report(loss))
    (tracker.on_failure if failed else tracker.on_end)(state)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("neox.features.trackers.journal._FIRST_PAUSE", 0.01)
    monkeypatch.setattr("neox.features.trackers.journal._LONGEST_PAUSE", 0.02)
    monkeypatch.setattr("neox.features.trackers.journal._SECONDS_TO_END", 300.0)


def tracker_to(server: Server, tmp_path: Path) -> Sent:
    tracker = Sent(small_plan(log_dir=str(tmp_path)))
    tracker.server = server
    return tracker


def test_rows_arrive_after_failures_once_and_in_order(tmp_path, caplog):
    server = Server(refusals=4)
    tracker = tracker_to(server, tmp_path)
    state = TrainState()
    tracker.on_start(state)
    for number in range(450):
        state.iteration += 1
        tracker.on_step(state, report(float(number)))
    while server.refusals:
        time.sleep(0.01)
    tracker.on_end(state)
    assert server.rows == [(number + 1, float(number)) for number in range(450)]
    assert server.closed == [False]
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sent_run_id"]


def test_what_is_left_is_sent_by_the_run_that_resumes(tmp_path, caplog):
    away = Server(refusals=float("inf"))
    run(tracker_to(away, tmp_path), [3.0, float("nan")])
    assert any("sent_rows.jsonl" in record.getMessage() for record in caplog.records)
    with (tmp_path / "sent_rows.jsonl").open("a") as journal:
        journal.write('[3, 1.0, {"train/lm')  # what a killed run writes last
    server = Server()
    run(tracker_to(server, tmp_path), [1.0], resumed_from=2, failed=True)
    assert [iteration for iteration, _ in server.rows] == [1, 2, 3]
    assert server.rows[1][1] != server.rows[1][1]
    assert server.closed == [True]
    run_id = server.runs[0]
    run(tracker_to(away, tmp_path), [3.0])
    run(tracker_to(server, tmp_path), [5.0])
    assert server.rows[3:] == [(1, 5.0)]
    assert server.runs[1] != run_id
    assert len(list(tmp_path.glob("*unsent*"))) == 1


def test_mlflow_holds_the_curves_and_the_settings(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="the optional package mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="MLflow's own store needs sqlalchemy")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    check_mlflow(mlflow, uri, tmp_path)


def check_mlflow(mlflow, uri, tmp_path):
    plan = small_plan(log_dir=str(tmp_path), use_mlflow=True, mlflow_tracking_uri=uri, mlflow_run_name="mine")
    run(MLflow(plan), [4.0, 3.0])
    run(MLflow(plan), [2.0], resumed_from=2)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("neox").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "mine"
    assert found.data.params["hidden_size"] == "32"
    history = client.get_metric_history(found.info.run_id, "train/lm_loss")
    assert sorted((point.step, point.value) for point in history) == [(1, 4.0), (2, 3.0), (3, 2.0)]


@pytest.mark.slow
def test_mlflows_server_that_starts_late(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the optional package mlflow is not installed")
    pytest.importorskip("flask", reason="MLflow's server needs the whole package mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    plan = small_plan(log_dir=str(tmp_path), use_mlflow=True, mlflow_tracking_uri=uri)
    run(MLflow(plan), [9.0])  # no server: nothing is lost
    assert len((tmp_path / "mlflow_rows.jsonl").read_text().splitlines()) == 1
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/s.db", "--artifacts-destination", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{uri}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        run(MLflow(plan), [8.0], resumed_from=1)
        client = mlflow.MlflowClient(tracking_uri=uri)
        (found,) = client.search_runs([client.get_experiment_by_name("neox").experiment_id])
        history = client.get_metric_history(found.info.run_id, "train/lm_loss")
        assert [(point.step, point.value) for point in history] == [(1, 9.0), (2, 8.0)]
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)


def test_comet_keeps_an_archive_without_a_server(tmp_path):
    pytest.importorskip("comet_ml", reason="the optional package comet_ml is not installed")
    keys = {"comet_project": "p", "comet_tags": ["a"], "comet_others": {"note": 7}}
    run(
        Comet(small_plan(log_dir=str(tmp_path), use_comet=True, comet_offline_directory=str(tmp_path), **keys)),
        [4.0, 3.0],
    )
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as packed:
        lines = [json.loads(line) for line in packed.read("messages.json").decode().splitlines()]
    text = json.dumps(lines)
    assert all(part in text for part in ("train/lm_loss", "hidden_size", '"note"'))
    assert not (tmp_path / "comet_rows.jsonl").exists()


def test_trackio_keeps_rows_on_this_machine(tmp_path):
    pytest.importorskip("trackio", reason="the optional package trackio is not installed")
    program = (
        "from tests.unit.train.test_remote_trackers import run\n"
        "from neox.features.trackers.trackio import Trackio\n"
        "from tests.plans import small_plan\n"
        f"plan = small_plan(log_dir={str(tmp_path)!r}, use_trackio=True, trackio_run_name='r')\n"
        "run(Trackio(plan), [4.0, 3.0])\n"
        "run(Trackio(plan), [2.0], resumed_from=2)\n"
    )
    environment = {
        **os.environ,
        "TRACKIO_DIR": str(tmp_path / "t"),
        "HF_HOME": str(tmp_path / "h"),
        "HF_HUB_OFFLINE": "1",
    }
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = str(root)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    import sqlite3

    (database,) = [path for path in (tmp_path / "t").rglob("*.db") if "neox" in path.name]
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
    losses = [(step, json.loads(metrics)["train/lm_loss"]) for step, metrics in rows]
    assert losses == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert Trackio.name == "trackio"
