"""What a run of a sweep has come to, by the events in its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from neox.errors import ConfigError
from neox.launch import Cause
from neox.launch.supervisor.outcome import EndKind
from neox.run_events import append_event
from tests.plans import SMALL
from tools.sweep.command import format_plans
from tools.sweep.places import Place, find_places
from tools.sweep.planned_run import plan_runs
from tools.sweep.run_files import RunFiles, State
from tools.sweep.sweep_file import SweepRun, read_sweep

VOCABULARY = Path(__file__).parents[4] / "tests" / "golden" / "data" / "tokenizer.json"


def run_in(directory: Path) -> RunFiles:
    return RunFiles(SweepRun("a", {}), directory, steps=4)


def test_only_a_last_word_of_the_newest_run_is_a_divergence(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    append_event(tmp_path, "start", restart=0, step=None, hosts=[])
    append_event(tmp_path, "end", reported=Cause.NOT_FINITE, decision="restart", kind="rank", step=2)
    append_event(tmp_path, "start", restart=1, step=None, hosts=[])
    assert run.state() is not State.DIVERGED  # killed after it was started again

    append_event(tmp_path, "end", reported=Cause.NOT_FINITE, decision="stop", kind="rank", step=2)
    assert run.state() is State.DIVERGED

    append_event(tmp_path, "start", restart=0, step=None, hosts=[])  # by `--redo`
    assert run.last_end() is None
    assert run.state() is not State.DIVERGED


@pytest.mark.parametrize(
    ("evaluated", "kind", "state"),
    [
        (4, EndKind.FINISHED, State.DONE),
        (2, EndKind.FINISHED, State.BEGUN),
        (2, EndKind.ASKED, State.BEGUN),
    ],
)
def test_a_run_without_its_last_evaluation_is_not_done(
    tmp_path: Path, evaluated: int, kind: EndKind, state: State
) -> None:
    run = run_in(tmp_path)
    append_event(tmp_path, "start", restart=0, step=None, hosts=[])
    rows: list[dict[str, Any]] = []
    for step in range(1, 5):
        rows.append({"iteration": step, "kind": "step", "train/lm_loss": 3.0})
        if step in (2, evaluated):
            rows.append({"iteration": step, "kind": "validation", "validation/lm_loss": 3.0})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    append_event(tmp_path, "end", decision="stop", kind=kind.value, status=0)
    assert run.state() is state


@pytest.mark.parametrize(
    "grid",
    [
        {"optimizer.params.lr": [1e-3, "1e-3"]},
        {"optimizer.params.lr": [1e-3, "0.001"]},
        {"optimizer.params.weight_decay": [0, 0.0]},
        {"eval_at_start": [True, "true"]},
        {"zero_optimization": [{"stage": 1, "overlap_comm": True}, {"overlap_comm": True, "stage": 1}]},
    ],
)
def test_values_that_make_the_same_configuration_are_one_run(tmp_path: Path, grid: dict[str, list[Any]]) -> None:
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump(SMALL))
    file = tmp_path / "sweep.yml"
    file.write_text(yaml.safe_dump({"configs": [str(tmp_path / "tiny.yml")], "grid": grid}, sort_keys=False))
    with pytest.raises(ConfigError, match="same"):
        plan_runs(read_sweep(file), Place())


def test_a_group_of_equal_runs_is_named_once_with_how_to_repeat_a_run(tmp_path: Path) -> None:
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump(SMALL))
    file = tmp_path / "sweep.yml"
    runs = [{"name": name} for name in "abcd"] + [{"name": name, "seed": 7} for name in "ef"]
    file.write_text(yaml.safe_dump({"configs": [str(tmp_path / "tiny.yml")], "list": runs}))
    with pytest.raises(ConfigError) as raised:
        plan_runs(read_sweep(file), Place())
    lines = str(raised.value).splitlines()
    assert [line.partition(" make")[0] for line in lines] == ["a, b, c and d", "e and f"]
    assert all("seed" in line for line in lines)


def test_a_wrong_value_is_named_once_by_its_place_in_the_sweep_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump(SMALL))
    file = tmp_path / "sweep.yml"
    file.write_text(
        f"configs: [{tmp_path / 'tiny.yml'}]\n"
        "set: {rampup_batch_size: false}\n"
        "grid:\n  seed: [1, 2]\n  optimizer.params.lr: [1.0e-3, fast]\n"
    )
    with pytest.raises(ConfigError) as raised:
        plan_runs(read_sweep(file), Place())
    (of_all, of_some) = str(raised.value).splitlines()
    assert of_all.startswith(f"{file}:2: `rampup_batch_size: false`")
    assert "`null`" in of_all
    assert of_some.startswith(f"seed=1,lr=fast, seed=2,lr=fast: {file}:5: `optimizer.params.lr: 'fast'`")


def test_runs_without_a_planned_time_name_the_keys_that_give_it(tmp_path: Path) -> None:
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump({**SMALL, "train_iters": 4, "launcher": "local"}))
    file = tmp_path / "sweep.yml"
    settings: dict[str, Any] = {}
    words = []
    for settings in ({}, {"peak_theoretical_tflops": 0.1}):
        file.write_text(
            yaml.safe_dump({"configs": [str(tmp_path / "tiny.yml")], "set": settings, "grid": {"seed": [1]}})
        )
        words.append(format_plans(plan_runs(read_sweep(file), Place()), [Place()]).splitlines()[-1])
    assert "peak_theoretical_tflops" in words[0]
    assert "expected_mfu" in words[0]
    assert "peak_theoretical_tflops" not in words[1]


def test_values_that_make_other_configurations_are_other_runs(tmp_path: Path) -> None:
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump(SMALL))
    file = tmp_path / "sweep.yml"
    grid = {"optimizer.params.lr": [1e-3, 2e-3], "seed": [1, 2]}
    file.write_text(yaml.safe_dump({"configs": [str(tmp_path / "tiny.yml")], "grid": grid}))
    assert len(plan_runs(read_sweep(file), Place())) == 4


def test_events_of_a_run_are_in_its_directory_or_below_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {**SMALL, "tokenizer_type": "HFTokenizer", "vocab_file": str(VOCABULARY), "num_gpus": 1}
    Path("a.yml").write_text(yaml.safe_dump(keys))
    list_ = [{"name": "relative", "tensorboard_dir": "../tb"}, {"name": "absolute", "tensorboard_dir": "/tb"}]
    Path("seeds.yml").write_text(yaml.safe_dump({"configs": ["a.yml"], "list": list_}))
    relative, absolute = plan_runs(read_sweep(Path("seeds.yml")), Place())
    assert relative.config.logging.tensorboard_dir == str(relative.directory / "tensorboard")
    assert absolute.config.logging.tensorboard_dir == "/tb/seeds/absolute"


def test_keys_of_ranks_that_a_place_decides_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {**SMALL, "tokenizer_type": "HFTokenizer", "vocab_file": str(VOCABULARY), "num_gpus": 2}
    Path("a.yml").write_text(yaml.safe_dump(keys))
    Path("hosts").write_text("one slots=4\n")
    (place,) = find_places("hosts", None)
    for settings, is_refused in (({"num_gpus": 1}, True), ({"num_gpus": None}, False), ({}, False)):
        text = yaml.safe_dump({"configs": ["a.yml"], "set": settings, "grid": {"seed": [1, 2]}})
        Path("seeds.yml").write_text(text)
        sweep = read_sweep(Path("seeds.yml"))
        if is_refused:
            with pytest.raises(ConfigError, match=r"num_gpus.*slots_per_run"):
                plan_runs(sweep, place)
        else:
            assert [run.plan.grid.world_size for run in plan_runs(sweep, place)] == [4, 4]
