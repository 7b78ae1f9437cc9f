"""Progress of sweeps: states, the best run, and the time that is left, from the files in their directories."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from neox.errors import DataError
from neox.launch import Cause
from neox.launch.supervisor.outcome import EndKind
from neox.resume import lock_output
from neox.run_events import append_event
from tests.errors import raises_naming
from tests.unit.tools.conftest import Run
from tools.sweep.progress import SweepProgress, format_progress, progress_json, sweep_progress
from tools.sweep.record import RECORD_FILE, Launches, ladder_lock_prefix, lock_prefix, read_record, write_record
from tools.sweep.run_files import RunFiles
from tools.sweep.sweep_file import Sweep, SweepRun

STEPS = 10
END = {"decision": "stop", "step": STEPS}


def trained(directory: Path, steps: int, loss: float, **last: Any) -> None:
    """Write the files of a run that has trained so many steps of 2 seconds; `last` is its end, if it has ended."""
    append_event(directory, "start", restart=0, step=None, hosts=["worker-0"])
    (directory / "config.yml").write_text(f"train_iters: {STEPS}\n")
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {"iteration": step, "kind": "step", "train/lm_loss": 9.0, "train/batch_size": 1.0}
            row |= {"train/seq_length": 8.0, "runtime/iteration_time": 2.0, "runtime/tokens_per_sec": 4.0}
            file.write(json.dumps(row) + "\n")
        file.write(json.dumps({"iteration": steps, "kind": "validation", "validation/lm_loss": loss}) + "\n")
    if last:
        append_event(directory, "end", **last)


def sweep_in(
    directory: Path,
    names: str,
    *,
    places: int = 1,
    operations: Mapping[str, float] | None = None,
    planned: float | None = None,
    launches: Launches | None = None,
    **keys: Any,
) -> Path:
    """Write the record of a sweep whose runs have names of one letter."""
    runs = []
    for number, name in enumerate(names):
        (directory / name).mkdir(exist_ok=True)
        amount = (operations or {}).get(name, 100.0)
        run = SweepRun(name, {"lr": float(number)})
        runs.append(RunFiles(run, directory / name, STEPS, operations=amount, planned_seconds=planned))
    sweep = Sweep("lr", directory, (), tuple(run.run for run in runs), **keys)
    write_record(sweep, runs, places, launches or Launches())
    return directory


def left(progress: SweepProgress) -> float:
    assert progress.left is not None
    return progress.left.seconds


def test_states_reasons_and_the_best_run_with_the_step_of_its_value(tmp_path: Path) -> None:
    launches = Launches(causes={"d": "out of luck", "a": "of an earlier start"}, hosts={"a": "worker-7"})
    sweep_in(tmp_path, "abcdef", launches=launches)
    finished = {**END, "kind": EndKind.FINISHED.value, "status": 0}
    trained(tmp_path / "a", STEPS, 3.0, **finished)
    trained(tmp_path / "b", STEPS, 2.5, **finished)
    trained(tmp_path / "c", 4, 1.0)
    trained(tmp_path / "d", 3, 0.5, **END | {"kind": EndKind.RANK.value, "status": 1})
    trained(tmp_path / "e", 3, 0.1, **END | {"kind": EndKind.RANK.value, "reported": Cause.NOT_FINITE})
    (tmp_path / "target").mkdir()
    trained(tmp_path / "target", 2, 5.0)
    progress = sweep_progress(tmp_path)
    counts = {"waiting": 1, "begun": 0, "done": 2, "diverged": 1, "failed": 1, "in training": 1}
    assert progress.counts == counts
    assert progress.state == "running"
    status = progress_json(progress)
    assert status["best"] == {"run": "b", "value": 2.5, "of": "validation/lm_loss", "step": STEPS}
    rows = {row["name"]: row for row in status["runs"]}
    assert [row["name"] for row in status["runs"]][:2] == ["b", "a"]
    assert (rows["c"]["live"]["step"], rows["c"]["live"]["tokens_per_second"]) == (4, 4.0)
    assert [rows[name]["cause"] for name in "ade"] == ["", "out of luck", ""]
    assert (rows["a"]["host"], rows["f"]["live"]) == ("worker-7", None)
    assert status["other_runs"]["target"]["step"] == 2
    text = format_progress(progress)
    for part in ("in training: c: running, step 4 of 10, loss 9", "failed: d: out of luck", "other run here: target"):
        assert part in text
    assert "b, validation/lm_loss 2.5000 at step 10" in text


def test_the_time_left_follows_from_the_runs_that_are_done(tmp_path: Path) -> None:
    """Their seconds are those of their places, with what steps do not count; larger runs take longer."""
    operations = {"a": 100.0, "b": 100.0, "c": 100.0, "d": 400.0}
    launches = Launches(seconds={"a": 50.0})
    finished = {**END, "kind": EndKind.FINISHED.value, "status": 0}
    sweep_in(tmp_path, "abcd", operations=operations, planned=7.0, launches=launches)
    trained(tmp_path / "a", STEPS, 3.0, **finished)
    assert left(sweep_progress(tmp_path)) == pytest.approx(50 + 50 + 200)
    trained(tmp_path / "b", 4, 3.0)
    assert left(sweep_progress(tmp_path)) == pytest.approx(6 * 2 + 50 + 200)  # its own steps that are left
    sweep_in(tmp_path, "abcd", operations=operations, launches=launches, places=2)
    assert left(sweep_progress(tmp_path)) == pytest.approx(12 + 200)  # c has a free place, and ends before d does
    append_event(tmp_path / "b", "end", kind=EndKind.ASKED.value, status=0, decision="stop")
    sweep_in(tmp_path, "abcd", operations=operations, launches=launches)
    progress = sweep_progress(tmp_path)
    assert progress.state == "stopped"
    assert left(progress) == pytest.approx(0.6 * 50 + 50 + 200)


def test_a_run_whose_command_has_just_been_started_has_not_failed(tmp_path: Path) -> None:
    """Before its first event, a run has an output as one that could not start, or the end of an earlier start."""
    directory = sweep_in(tmp_path, "abc", planned=7.0, launches=Launches({}, {"b": "disk full"}, training=["a", "b"]))
    (tmp_path / "a" / "output.log").write_text("")
    trained(tmp_path / "b", 5, 3.0, decision="stop", step=5, kind=EndKind.RANK.value, status=1)
    with lock_output(lock_prefix(read_record(directory).sweep)):
        counts = sweep_progress(tmp_path).counts
    assert (counts["begun"], counts["failed"], counts["waiting"]) == (2, 0, 1)
    assert sweep_progress(tmp_path).counts["failed"] == 2, "no process trains them"


def test_steps_of_a_sweep_that_was_killed_count_in_the_time_left(tmp_path: Path) -> None:
    """The seconds of a run's places are recorded when it ends; those of its steps, 2 each, are in its metrics."""
    sweep_in(tmp_path, "ab", launches=Launches(seconds={"a": 1.0}))
    trained(tmp_path / "a", STEPS, 3.0, **END, kind=EndKind.FINISHED.value, status=0)
    assert left(sweep_progress(tmp_path)) == pytest.approx(2 * STEPS)


def test_before_a_run_is_done_the_time_left_is_of_steps_then_of_the_plan(tmp_path: Path) -> None:
    sweep_in(tmp_path, "abc", planned=7.0)
    assert left(sweep_progress(tmp_path)) == 21.0
    sweep_in(tmp_path, "abc")
    assert sweep_progress(tmp_path).left is None
    assert "left: not known" in format_progress(sweep_progress(tmp_path))
    trained(tmp_path / "a", 5, 3.0)
    assert left(sweep_progress(tmp_path)) == pytest.approx(5 * 2 + 2 * 20)


def test_a_sweep_is_running_while_a_process_has_its_lock(tmp_path: Path) -> None:
    progress = sweep_progress(sweep_in(tmp_path, "a"))
    assert progress.state == "stopped"
    with lock_output(lock_prefix(progress.record.sweep)):
        assert sweep_progress(tmp_path).state == "running"
    with lock_output(ladder_lock_prefix(tmp_path)):  # between the stages of a ladder
        assert sweep_progress(tmp_path).state == "running"
    trained(tmp_path / "a", STEPS, 3.0, **END, kind=EndKind.FINISHED.value, status=0)
    assert sweep_progress(tmp_path).state == "finished"
    assert sweep_progress(sweep_in(tmp_path, "a", following=3, compares=False)).state == "stopped"
    assert progress_json(sweep_progress(tmp_path))["best"] is None, "runs of a ladder are no alternatives"


def test_a_record_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    sweep_in(tmp_path, "a")
    (tmp_path / RECORD_FILE).write_text('{"name": "lr"}')
    with raises_naming(DataError, tmp_path / RECORD_FILE):
        sweep_progress(tmp_path)


def test_the_status_of_a_sweep_is_shown_by_its_directory_and_named_above_it(tmp_path: Path, run: Run) -> None:
    (tmp_path / "lr").mkdir()
    sweep_in(tmp_path / "lr", "ab")
    trained(tmp_path / "lr" / "a", STEPS, 3.0, **END, kind=EndKind.FINISHED.value, status=0)
    shown = run("status.py", tmp_path / "lr")
    assert (shown.returncode, "1 waiting, 1 done" in shown.stdout) == (0, True)
    assert json.loads(run("status.py", tmp_path / "lr", "--json").stdout)["counts"]["done"] == 1
    assert "validation" in run("status.py", tmp_path / "lr" / "a").stdout
    refused = run("status.py", tmp_path)
    assert refused.returncode != 0
    assert str(tmp_path / "lr" / "a") in refused.stderr
    assert f"a sweep, of which {tmp_path / 'lr'}" in refused.stderr
