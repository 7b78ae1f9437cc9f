"""Whole launches with each pipeline schedule: a run that goes on under another schedule is the undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.launched_runs import ROOT, LaunchedRun

SETTINGS = (
    "num_layers=6",
    "pipe_parallel_size=2",
    "gradient_accumulation_steps=4",
    "train_iters=8",
    "lr_decay_iters=8",
    "eval_iters=2",
    "log_interval=1",
    f"data_path={ROOT / 'tests' / 'golden' / 'data' / 'small_text_document'}",
)
SCHEDULES = ("interleaved", "dualpipev", "1f1b")


def launch(directory: Path, runs: list[LaunchedRun], *settings: str) -> dict[int, dict[str, float]]:
    """Run `deepy.py train.py` to its end; return the rows of its metrics that have a loss, by iteration."""
    arguments = []
    for setting in (*SETTINGS, *settings):
        arguments += ["--set", setting]
    run = LaunchedRun(directory, arguments, script=None)
    runs.append(run)
    output = run.output(400)
    assert run.process.returncode == 0, output
    run.seconds_until_gone()
    rows: dict[int, dict[str, float]] = {}
    for line in (run.directory / "run" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        losses = {name: value for name, value in row.items() if name.endswith("/lm_loss")}
        rows.setdefault(row["iteration"], {}).update(losses)
    return {iteration: losses for iteration, losses in rows.items() if losses}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("zero", [0, 1])
def test_run_goes_on_under_other_schedules(tmp_path: Path, runs: list[LaunchedRun], zero: int) -> None:
    stage = f"zero_optimization.stage={zero}"
    calm = launch(tmp_path, runs, stage)
    assert sorted(calm) == list(range(1, 9))
    save = tmp_path / "checkpoints"
    rough: dict[int, dict[str, float]] = {}
    for number, schedule in enumerate(SCHEDULES):
        keys = [stage, f"pipeline_schedule={schedule}", f"save={save}", f"load={save}", "exit_interval=3"]
        rows = launch(tmp_path, runs, *keys)
        assert min(rows) == 3 * number + 1, "the step after the checkpoint of the schedule before"
        rough |= rows
    assert sorted(rough) == sorted(calm)
    for iteration, losses in calm.items():
        assert rough[iteration] == pytest.approx(losses, rel=2e-6), iteration
    assert (save / "latest").read_text().strip() == "global_step8"
