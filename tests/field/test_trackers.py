"""Trackers' rules about names, values and offline runs, as others met them."""

from __future__ import annotations

import posixpath
import re
import time
from pathlib import Path
from typing import Any

import pytest

from neox.engine import TrainState
from neox.features.trackers.journal import QueuedTracker, Row
from neox.features.trackers.mlflow import MLflow, accepted_name
from neox.features.trackers.wandb import WANDB_RUN_ID_FILE, WandB
from tests.plans import small_plan


class MlflowError(Exception):
    """Error as MLflow's: with a code."""

    def __init__(self, message: str, error_code: str = "INVALID_PARAMETER_VALUE") -> None:
        super().__init__(message)
        self.error_code = error_code


class Client:
    """An MLflow server with its rules (mlflow/utils/validation.py); `broken` refuses values under some names."""

    def __init__(self) -> None:
        self.metrics: list[tuple[str, float, int]] = []
        self.params: dict[str, str] = {}
        self.status: list[str] = []
        self.runs = 0
        self.broken: set[str] = set()
        self.away = False

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        if self.away:
            raise ConnectionError("no server there")
        for entry in [*metrics, *params]:
            if not re.match(r"^[/\w.\- ]*$", entry.key) or len(entry.key) > 250:
                raise MlflowError(f"Invalid name {entry.key}")
            norm = posixpath.normpath(entry.key)
            if norm != entry.key or norm == "." or norm.startswith(("..", "/")):
                raise MlflowError(f"Invalid path {entry.key}")
            if any(part in entry.key for part in self.broken):
                raise MlflowError(f"bad value of {entry.key}")
        self.metrics += [(metric.key, metric.value, metric.step) for metric in metrics]
        self.params |= {param.key: param.value for param in params}

    def set_terminated(self, run: str, status: str) -> None:
        if self.away:
            raise ConnectionError("no server there")
        self.status.append(status)


class Entry:
    """Metric or parameter."""

    def __init__(self, key: str, value: Any, time_ms: int = 0, step: int = 0) -> None:
        self.key = key
        self.value = value
        self.step = step


class ToClient(MLflow):
    """MLflow's tracker, without the package."""

    def __init__(self, plan: Any, client: Client) -> None:
        QueuedTracker.__init__(self, plan)
        self._mlflow: Any = type("mlflow", (), {"entities": type("entities", (), {"Metric": Entry, "Param": Entry})})
        self._client = client
        self._run = "r"

    def connect(self, *, is_resumed: bool) -> None:
        """Nothing to do."""


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr("neox.features.trackers.journal._FIRST_PAUSE", 0.01)
    monkeypatch.setattr("neox.features.trackers.journal._LONGEST_PAUSE", 0.02)
    return Client()


def run(client: Client, directory: Path, rows: list[dict[str, float]], first: int = 0, **keys: Any) -> None:
    tracker = ToClient(small_plan(log_dir=str(directory)), client)
    state = TrainState(iteration=first)
    tracker.on_start(state)
    for scalars in rows:
        state.iteration += 1
        tracker.write(state.iteration, "step", scalars)
    tracker.on_end(state)


NAMES = [
    "train/lm_loss",
    "validation/wiki@2024 (v1)/lm_loss",
    "validation/wiki@2024 [v1]/lm_loss",
    "timing(s)/gen",
    "val/AR@100",
    "01: running time",
    "score%",
    "a//b",
    "../up",
    "/root",
    "dir/",
    "./x",
    "中文/损失",
    "x" * 300,
    "(((",
    "a/./b",
]


def test_scores_arrive_whatever_their_names(client: Client, tmp_path: Path) -> None:
    """verl#119, transformers PR 39469, mmdetection#10258, mmocr#1558, mlflow-export-import#4: names."""
    run(client, tmp_path, [dict.fromkeys(NAMES, 1.5)] * 2)
    assert len(client.metrics) == 2 * len(NAMES)
    assert len({name for name, _, _ in client.metrics}) == len(NAMES)  # none is taken for another
    assert client.status == ["FINISHED"]
    assert accepted_name("train/lm_loss") == "train/lm_loss"
    assert [accepted_name(name) for name in NAMES] == [accepted_name(accepted_name(name)) for name in NAMES]


def test_one_bad_value_blocks_no_other(client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """verl#119, mlflow#15535: what a server refuses is named once; the rest arrives, and the run ends."""
    client.broken = {"odd"}
    run(client, tmp_path, [{"loss": float(i), "odd": float("nan"), "lr": 0.1} for i in range(9)])
    assert [step for name, _, step in client.metrics if name == "loss"] == list(range(1, 10))
    assert len(client.metrics) == 18
    assert client.status == ["FINISHED"]
    assert sum("odd" in record.getMessage() for record in caplog.records) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlflow_run_id"]


def test_a_run_with_rows_left_does_not_stay_running(client: Client, tmp_path: Path) -> None:
    """transformers PR 39469: rows that cannot be sent now are sent by a resume; the run is ended all the same."""

    def refuse(*_: Any, **__: Any) -> None:
        raise MlflowError("try later", "TEMPORARILY_UNAVAILABLE")

    log_batch = client.log_batch
    client.log_batch = refuse  # type: ignore[method-assign]
    run(client, tmp_path, [{"loss": 1.0}])
    assert (client.metrics, client.status) == ([], ["FINISHED"])
    client.log_batch = log_batch  # type: ignore[method-assign]
    run(client, tmp_path, [{"loss": 2.0}], first=1)
    assert [(value, step) for _, value, step in client.metrics] == [(1.0, 1), (2.0, 2)]


def test_a_start_without_a_server_waits_for_it(client: Client, tmp_path: Path) -> None:
    client.away = True
    tracker = ToClient(small_plan(log_dir=str(tmp_path)), client)
    state = TrainState()
    tracker.on_start(state)
    tracker.write(1, "step", {"loss": 1.0})
    time.sleep(0.05)
    client.away = False
    tracker.on_end(state)
    assert client.metrics == [("loss", 1.0, 1)]


def test_settings_that_are_refused(client: Client, tmp_path: Path) -> None:
    """mlflow#4202: limits of parameters differ between versions; the other settings arrive."""
    client.broken = {"bad"}
    tracker = ToClient(small_plan(log_dir=str(tmp_path)), client)
    tracker._log_parameters([Entry(name, "1") for name in ("a", "bad", "c", "d")])
    assert list(client.params) == ["a", "c", "d"]
    tracker.send([Row(1, 0.0, {"loss": float("inf")})])
    assert client.metrics == [("loss", float("inf"), 1)]


@pytest.mark.parametrize(
    ("modes", "ids", "same_group"),
    [
        (("offline", "offline", "offline"), 3, True),
        (("online", "online"), 1, False),
        (("offline", "online", "online"), 2, True),
        (("online", "offline"), 2, False),
    ],
)
def test_starts_survive_a_sync(tmp_path: Path, modes: tuple[str, ...], ids: int, same_group: bool) -> None:
    """wandb#3841, #5865, #2423, #4624: an offline run is not resumed by its id; a sync would erase what is there."""
    board = WandB(small_plan(use_wandb=True))
    file = tmp_path / WANDB_RUN_ID_FILE
    found = []
    for number, mode in enumerate(modes):
        found.append(board._id_and_group(file, resumed=number > 0, offline=mode == "offline"))
    assert len({run_id for run_id, _ in found}) == ids
    if same_group:
        assert {group for _, group in found[:2]} == {found[0][0]}
    assert len(file.read_text().split()) == (3 if modes[-1] == "offline" else 1)
