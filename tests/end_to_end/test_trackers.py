"""Trainings through `deepy.py` whose figures go to MLflow's server, a Comet archive and Trackio's database."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.end_to_end.launched_runs import ROOT, LaunchedRun

DATA = ROOT / "tests" / "golden" / "data" / "small_text_document"
STEPS = 4


def train(directory: Path, runs: list[LaunchedRun], *settings: str, **variables: str) -> list[float]:
    """Train on two ranks through `deepy.py`, and return the loss of each step."""
    arguments = []
    steps = (f"train_iters={STEPS}", f"lr_decay_iters={STEPS}", "log_interval=1", f"data_path={DATA}")
    for setting in (*steps, *settings):
        arguments += ["--set", setting]
    run = LaunchedRun(directory, arguments, script=None, **variables)
    runs.append(run)
    output = run.output(900)
    assert run.process.returncode == 0, output
    rows = map(json.loads, (run.directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [row["train/lm_loss"] for row in rows if "train/lm_loss" in row]


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/s.db", "--artifacts-destination", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"{uri}/health", timeout=5)
                break
            except OSError:
                assert time.monotonic() < deadline, "MLflow's server does not start"
                time.sleep(0.5)
        yield uri
    finally:
        os.killpg(server.pid, 15)
        server.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_reports_to_mlflows_server(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the optional package mlflow is not installed")
    pytest.importorskip("flask", reason="MLflow's server needs the whole package mlflow")
    pytest.importorskip("sqlalchemy", reason="MLflow's server needs the whole package mlflow")
    with mlflow_server(tmp_path) as uri:
        losses = train(tmp_path, runs, "use_mlflow=true", f"mlflow_tracking_uri={uri}", "mlflow_run_name=mine")
        client = mlflow.MlflowClient(tracking_uri=uri)
        (found,) = client.search_runs([client.get_experiment_by_name("neox").experiment_id])
        history = client.get_metric_history(found.info.run_id, "train/lm_loss")
    assert found.info.status == "FINISHED"
    assert found.data.params["hidden_size"] == "32"
    assert sorted(point.step for point in history) == list(range(1, STEPS + 1))
    assert [point.value for point in sorted(history, key=lambda point: point.step)] == pytest.approx(losses)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_reports_to_a_comet_archive(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    pytest.importorskip("comet_ml", reason="the optional package comet_ml is not installed")
    losses = train(tmp_path, runs, "use_comet=true", "comet_project=p", f"comet_offline_directory={tmp_path}")
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as packed:
        lines = packed.read("messages.json").decode()
    assert "train/lm_loss" in lines
    assert all(f"{loss:.5f}"[:6] in lines for loss in losses)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_reports_to_trackios_database(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    pytest.importorskip("trackio", reason="the optional package trackio is not installed")
    folders = {"TRACKIO_DIR": str(tmp_path / "t"), "HF_HOME": str(tmp_path / "h"), "HF_HUB_OFFLINE": "1"}
    losses = train(tmp_path, runs, "use_trackio=true", "trackio_run_name=r", **folders)
    (database,) = [path for path in (tmp_path / "t").rglob("*.db") if "neox" in path.name]
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
    found = [(step, json.loads(metrics).get("train/lm_loss")) for step, metrics in rows]
    assert [loss for _, loss in found if loss is not None] == pytest.approx(losses)
