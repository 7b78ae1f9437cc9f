"""Status of a run from the files of its directory, as text, as JSON and over HTTP."""

from __future__ import annotations

import json
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from neox.errors import DataError
from neox.launch.agent.agent_files import write_pids
from neox.launch.run_lock import lock_directory
from neox.launch.status.run_paths import find_run_directory
from neox.launch.status.run_status import duration, format_status, overfitting_words, run_status
from neox.launch.status.status_server import StatusServer
from neox.metrics import draw
from neox.run_events import EVENTS_FILE
from tests.errors import raises_naming


def write_run(directory: Path, *events: dict[str, Any], steps: int = 30) -> Path:
    """Write the directory of a run whose 30 steps were interrupted after step 20 and went on from step 15."""
    logs = directory / "ranks" / "worker-0"
    logs.mkdir(parents=True)
    (logs / "rank_0000.log").touch()
    (directory / "config.yml").write_text("seed: 1\ntrain_iters: 60\n")
    with open(directory / "metrics.jsonl", "w") as file:
        for step in [*range(1, 21), *range(16, steps + 1)]:
            row = {"iteration": step, "kind": "step", "train/lm_loss": 9.0 - step / 10, "train/learning_rate": 0.1}
            speed = {"runtime/iteration_time": 2.0, "runtime/tokens_per_sec": 500.0}
            file.write(json.dumps({**row, **speed, "runtime/slow_host/worker-1": 1.3}) + "\n")
    first = {"event": "start", "time": 100.0, "restart": 0, "hosts": ["worker-0", "worker-1"], "ranks": 2, "step": None}
    failed = {
        "event": "end",
        "time": 200.0,
        "kind": "rank failed",
        "status": 137,
        "host": "worker-1",
        "rank": 1,
        "cause": "rank 1 was killed",
        "step": 20,
        "decision": "restart",
        "reason": "restart 1 of 9",
    }
    again = {**first, "time": 206.5, "restart": 1, "step": 15}
    lines = [json.dumps(event) for event in (first, failed, again, *events)]
    (directory / EVENTS_FILE).write_text("".join(f"{line}\n" for line in lines))
    return directory


def end(kind: str, status: int, **fields: Any) -> dict[str, Any]:
    return {"event": "end", "time": 300.0, "kind": kind, "status": status, "decision": "stop", "reason": None, **fields}


def test_progress_hosts_and_interruptions(tmp_path: Path) -> None:
    status = run_status(write_run(tmp_path))
    assert (status["state"], status["step"], status["steps"], status["loss"]) == ("running", 30, 60, 6.0)
    assert (status["seconds_per_step"], status["tokens_per_second"], status["seconds_left"]) == (2.0, 500.0, 60.0)
    assert [(host["name"], host["slower"]) for host in status["hosts"]] == [("worker-0", None), ("worker-1", 1.3)]
    assert status["hosts"][0]["silent_seconds"] < 60
    assert status["hosts"][1]["silent_seconds"] is None
    (event,) = status["interruptions"]
    assert (event["rank"], event["step"], event["steps_again"], event["seconds_to_start"]) == (1, 20, 5, 6.5)
    assert [step for step, _ in status["curves"]["train/lm_loss"]] == list(range(1, 31))
    text = format_status(status)
    for part in ("running", "step        30 of 60, loss 6", "worker-1", "1.30 times", "rank 1 was killed; restart"):
        assert part in text


@pytest.mark.parametrize(
    ("last", "state"),
    [
        (end("finished", 0), "finished"),
        (end("asked to end", 0), "stopped"),
        (end("preempted", 0), "preempted"),
        (end("rank failed", 1, cause="out of luck"), "failed"),
        (end("hang", 124, decision="restart after 2 s", reason="again"), "restarting"),
    ],
)
def test_states(last: dict[str, Any], state: str, tmp_path: Path) -> None:
    assert run_status(write_run(tmp_path, last))["state"] == state


def test_metrics_without_speeds_have_a_status(tmp_path: Path) -> None:
    write_run(tmp_path)
    rows = [{"iteration": step, "kind": "step", "train/lm_loss": 2.0} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    status = run_status(tmp_path)
    assert (status["step"], status["seconds_per_step"], status["tokens_per_second"]) == (2, None, None)
    assert "\nspeed " not in format_status(status)
    rows[1]["runtime/iteration_time"] = 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    status = run_status(tmp_path)
    assert (status["seconds_per_step"], status["tokens_per_second"], status["seconds_left"]) == (0.5, None, 29.0)
    assert "speed       0.5 s a step, 29 s left" in format_status(status)


def test_first_steps_of_starts_do_not_count_in_the_speed(tmp_path: Path) -> None:
    write_run(tmp_path)  # its second start goes on from step 15
    rows = []
    for step, seconds in ((14, 2.0), (15, 3.0), (16, 50.0), (17, 4.0), (18, 60.0)):
        row = {"iteration": step, "kind": "step", "train/lm_loss": 2.0}
        rows.append(row | {"runtime/iteration_time": seconds, "runtime/tokens_per_sec": 120.0 / seconds})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    status = run_status(tmp_path)
    assert (status["seconds_per_step"], status["tokens_per_second"]) == (3.5, 35.0)
    only = {**rows[0], "iteration": 1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(only) + "\n")
    assert run_status(tmp_path)["seconds_per_step"] == 2.0


@pytest.mark.parametrize(
    ("validation", "training", "lowest", "overfits"),
    [
        ([3.0, 2.5, 2.6, 2.7], [3.0, 2.4, 2.0, 1.5], 20, True),
        ([3.0, 2.5, 2.4, 2.45], [3.0, 2.4, 2.0, 1.5], 30, False),  # a single one above it
        ([3.0, 2.5, 2.51, 2.52], [3.0, 2.4, 2.0, 1.5], 20, False),  # it no longer falls
        ([3.0, 2.5, 2.6, 2.7], [3.0, 2.4, 2.6, 2.9], 20, False),  # both rise: that is no overfitting
        ([3.0, 2.5, 2.4, 2.3], [3.0, 2.4, 2.0, 1.5], 40, False),
    ],
)
def test_overfitting_is_named(
    tmp_path: Path, validation: list[float], training: list[float], lowest: int, overfits: bool
) -> None:
    write_run(tmp_path)
    rows: list[dict[str, Any]] = []
    for step in range(1, 41):
        rows.append({"iteration": step, "kind": "step", "train/lm_loss": training[(step - 1) // 10]})
        if step % 10 == 0:
            rows.append({"iteration": step, "kind": "validation", "validation/lm_loss": validation[step // 10 - 1]})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    status = run_status(tmp_path)
    (found,) = status["validation"]
    assert (found["lowest_step"], found["overfits"]) == (lowest, overfits)
    assert (found["step"], found["loss"]) == (40, validation[-1])
    assert ("since then: overfitting" in format_status(status)) == overfits


@pytest.mark.parametrize(("falls", "overfits"), [(True, True), (False, False)])
def test_overfitting_of_few_noisy_steps_is_named_also_from_the_start(
    tmp_path: Path, falls: bool, overfits: bool
) -> None:
    """Fine-tuning on conversations has few steps, noisy losses, and often its lowest loss at the start."""
    write_run(tmp_path)
    rows: list[dict[str, Any]] = [{"iteration": 0, "kind": "validation", "validation/lm_loss": 2.0}]
    for step in range(1, 31):
        level = 2.0 - 0.02 * step * falls
        rows.append({"iteration": step, "kind": "step", "train/lm_loss": level * (0.8 if step in (1, 2, 15) else 1.1)})
        if step % 10 == 0:
            rows.append({"iteration": step, "kind": "validation", "validation/lm_loss": 2.0 + 0.01 * step})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (found,) = run_status(tmp_path)["validation"]
    assert (found["lowest_step"], found["overfits"]) == (0, overfits)
    assert len(overfitting_words(tmp_path)) == overfits


def test_the_metrics_file_names_its_run(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    found = run_status(run / "metrics.jsonl")
    assert found["state"] == run_status(run)["state"]
    assert [host["name"] for host in found["hosts"]] == [host["name"] for host in run_status(run)["hosts"]]


def test_a_start_without_a_step_is_starting(tmp_path: Path) -> None:
    write_run(tmp_path)
    status = run_status(tmp_path)
    assert (status["state"], status["seconds_left"]) == ("running", 60.0)
    os.utime(tmp_path / "metrics.jsonl", (150.0, 150.0))  # before the last start
    assert run_status(tmp_path)["state"] == "starting"
    (tmp_path / "metrics.jsonl").write_text("")  # as the trainer opens it
    assert run_status(tmp_path)["state"] == "starting"
    (tmp_path / "metrics.jsonl").unlink()  # a run without log_dir
    assert run_status(tmp_path)["state"] == "running"
    write_run(tmp_path / "ended", end("rank failed", 1))
    assert run_status(tmp_path / "ended")["seconds_left"] is None


def test_a_start_without_an_end_was_interrupted(tmp_path: Path) -> None:
    start = {"event": "start", "time": 400.0, "restart": 0, "hosts": ["worker-0"], "ranks": 2, "step": 28}
    status = run_status(write_run(tmp_path, start))
    assert [event["time"] for event in status["interruptions"]] == [200.0, 400.0]
    assert (status["interruptions"][1]["step"], status["interruptions"][1]["seconds_to_start"]) == (None, 0.0)


def test_events_of_an_earlier_run_in_the_directory_are_not_shown(tmp_path: Path) -> None:
    left_out = {"event": "host left out", "time": 399.0, "host": "worker-1", "reason": "no answer"}
    fresh = {"event": "start", "time": 400.0, "restart": 0, "hosts": ["worker-0"], "ranks": 1, "step": None}
    status = run_status(write_run(tmp_path / "run", left_out, fresh))
    assert (status["starts"], status["interruptions"]) == (1, [])
    assert [event["event"] for event in status["other_events"]] == ["host left out"]
    status = run_status(write_run(tmp_path / "again", {**fresh, "restart": 1}))  # before its first checkpoint
    assert len(status["interruptions"]) == 2


def test_rollbacks_are_shown(tmp_path: Path) -> None:
    spike = {"event": "loss spike", "time": 250.0, "step": 29, "cause": "loss 12", "decision": "back to step 24"}
    warned = {**spike, "step": 27, "decision": "no rollback", "back_to": None}
    status = run_status(write_run(tmp_path / "run", {**spike, "back_to": 24}, warned))
    assert status["rollbacks"] == [29]
    text = format_status(status)
    assert "loss spike: loss 12; back to step 24" in text
    metrics = tmp_path / "run" / "metrics.jsonl"
    draw({"": metrics}, tmp_path / "with.png")
    write_run(tmp_path / "other", {**spike, "back_to": None}, warned)
    draw({"": tmp_path / "other" / "metrics.jsonl"}, tmp_path / "without.png")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def test_a_launcher_that_was_killed_is_noticed(tmp_path: Path) -> None:
    write_run(tmp_path)
    holder = {"script": "train.py", "pid": os.getpid(), "host": socket.gethostname()}
    (tmp_path / ".run.lock").write_text(json.dumps(holder))
    assert run_status(tmp_path)["state"] == "running"
    (tmp_path / ".run.lock").write_text(json.dumps({**holder, "pid": 2**22 + 1}))
    assert run_status(tmp_path)["state"] == "ended"
    (tmp_path / ".run.lock").write_text(json.dumps({**holder, "pid_since": "0"}))
    assert run_status(tmp_path)["state"] == "ended", "another process has its id now"
    with ExitStack() as held:
        assert lock_directory(tmp_path, "train.py", held) is None
        assert run_status(tmp_path)["state"] == "running"


def test_a_lock_of_another_script_shows_that_the_launcher_is_gone(tmp_path: Path) -> None:
    write_run(tmp_path)
    holder = {"script": "generate.py", "pid": os.getpid(), "host": socket.gethostname()}
    (tmp_path / ".run.lock").write_text(json.dumps(holder))
    assert run_status(tmp_path)["state"] == "ended"
    (tmp_path / ".run.lock").write_text(json.dumps({**holder, "host": "elsewhere"}))
    assert run_status(tmp_path)["state"] == "running"


def test_what_is_unknown_of_an_interruption_is_not_shown(tmp_path: Path) -> None:
    hang = end("hang", 124, decision="restart after 2 s", cause=None, step=None)
    change = {"event": "ranks changed", "time": 301.0}
    status = run_status(write_run(tmp_path, hang, change))
    assert [event["kind"] for event in status["interruptions"]] == ["rank failed", "hang"]
    assert "None" not in format_status(status)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        run_status(tmp_path)


def test_durations() -> None:
    assert [duration(seconds) for seconds in (7.4, 125, 7260, 200000)] == ["7 s", "2 min 5 s", "2 h 1 min", "2 d 7 h"]


@contextmanager
def serving(directory: Path, *hosts: str) -> Iterator[int]:
    """Serve the status of a run; yield the port."""
    with StatusServer(directory, ("127.0.0.1", 0), hosts) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def get(port: int, path: str, host: str = "localhost") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_server_answers_this_machine_only(tmp_path: Path) -> None:
    write_run(tmp_path)
    with serving(tmp_path, "monitor") as port:
        code, text = get(port, "/status.json")
        assert (code, json.loads(text)["step"]) == (200, 30)
        assert get(port, "/status.json", f"monitor:{port}")[0] == 200
        assert get(port, "/status.json", "evil.example")[0] == 400
        assert get(port, "/../run_status.py")[0] == 404
        for page in ("/", "/page.js", "/run.js", "/status.css"):
            assert get(port, page)[0] == 200
        (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"broken\n')
        assert get(port, "/status.json")[0] == 503


def test_the_picture_of_a_run_shows_its_interruptions(tmp_path: Path) -> None:
    metrics = write_run(tmp_path / "run") / "metrics.jsonl"
    draw({"": metrics}, tmp_path / "with.png")
    (tmp_path / "run" / EVENTS_FILE).unlink()
    draw({"": metrics}, tmp_path / "without.png")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def test_a_run_is_found_by_its_directory_its_metrics_and_its_checkpoints(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "logs")
    checkpoint = tmp_path / "runs" / "checkpoints" / "global_step3"
    (checkpoint / "configs").mkdir(parents=True)
    (checkpoint / "configs" / "config.yml").write_text(f"log_dir: {run}\n")
    for path in (run, run / "metrics.jsonl", tmp_path / "runs", checkpoint, checkpoint.parent):
        assert find_run_directory(path) == run, path
    write_run(tmp_path / "runs" / "others")
    with raises_naming(DataError, "logs", "others"):
        find_run_directory(tmp_path / "runs")
    with raises_naming(DataError, tmp_path / "nothing"):
        find_run_directory(tmp_path / "nothing")


def test_process_ids_are_shown_while_the_run_goes_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_pids(run / "ranks" / "worker-0", {"agent": 40, "0": 41, "1": 42})
    status = run_status(run)
    assert [host["pids"] for host in status["hosts"]] == [{"agent": 40, "0": 41, "1": 42}, {}]
    assert "agent: 40, 0: 41, 1: 42" in format_status(status)
    ended = write_run(tmp_path / "ended", end("finished", 0))
    write_pids(ended / "ranks" / "worker-0", {"agent": 40})
    assert run_status(ended)["hosts"][0]["pids"] == {}
