"""Which checkpoint a run starts from: one answer for launcher, ranks and restarts, for any directory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neox.checkpoint_files.finding import newest_checkpoint
from neox.checkpoint_files.manifest import write_manifest
from neox.config import NeoXConfig, apply_decisions
from neox.decisions.checkpoint import choose_checkpoint
from neox.plan import format_plan, plan_as_dict
from neox.plan.run_identity import RUN_FILE, find_run, identity_text, run_identity
from neox.plan.run_start import ChosenStart, StartMode
from neox.plan.schedule import schedule_of
from neox.plan.trained_model import saved_precision
from neox.preflight.checkpoint_checks import checkpoint_problems
from tests.plans import SMALL, small_plan
from tests.resumed_runs import decided_run

WARM = {"lr_decay_style": "constant", "warmup": 0.5, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


def make_config(**keys: Any) -> NeoXConfig:
    return NeoXConfig.from_flat({**SMALL, **keys})


def put(save: Path, step: int, config: NeoXConfig, sequence: int | None = None) -> Path:
    """Write a complete checkpoint without weights, the last commit of its directory."""
    checkpoint = save / f"global_step{step}"
    (checkpoint / "configs").mkdir(parents=True)
    (checkpoint / "configs" / "config.yml").write_text(json.dumps(config.to_flat()))
    (checkpoint / RUN_FILE).write_text(identity_text(run_identity(config)))
    write_manifest(checkpoint, step, sequence or step)
    (save / "latest").write_text(checkpoint.name)
    return checkpoint


def cut(checkpoint: Path) -> None:
    """Damage a checkpoint so that the sizes of its files show it."""
    (checkpoint / RUN_FILE).write_text("{")


LATEST = {
    "valid": lambda save: None,
    "missing": lambda save: (save / "latest").unlink(),
    "empty": lambda save: (save / "latest").write_text(""),
    "stale": lambda save: (save / "latest").write_text("global_step99"),
    "newest damaged": lambda save: cut(put(save, 15, make_config(train_iters=10))),
}


@pytest.mark.parametrize("directory", LATEST)
@pytest.mark.parametrize("named", ["load", "save"])
def test_warm_up_and_precision_follow_the_checkpoint_that_is_loaded(tmp_path: Path, directory: str, named: str) -> None:
    """Megatron-DeepSpeed#350, gpt-neox PR 1375: without a valid `latest`, the learning rate fell into its warm-up."""
    keys = {**WARM, "save": str(tmp_path)}
    loaded = put(tmp_path, 10, make_config(**keys, train_iters=10, precision="fp32"))
    LATEST[directory](tmp_path)
    now = make_config(**keys, train_iters=40, precision="auto", **({"load": str(tmp_path)} if named == "load" else {}))
    decided = decided_run(now)
    assert not decided.problems
    assert decided.start == ChosenStart(StartMode.RESUME, str(tmp_path), str(loaded), 10, own_directory=True)
    assert schedule_of(decided.config).lr(11) == pytest.approx(1e-3)
    assert decided.precision == "fp32"
    assert newest_checkpoint(tmp_path) == loaded
    assert saved_precision(make_config(save=str(tmp_path))) == "fp32"
    found = find_run(tmp_path)
    assert found is not None
    assert found.checkpoint == loaded


def test_a_checkpoint_that_ranks_have_found_damaged_does_not_count(tmp_path: Path) -> None:
    config = make_config(save=str(tmp_path))
    for step in (10, 20, 30):
        put(tmp_path, step, config)
    newest, before = tmp_path / "global_step30", tmp_path / "global_step20"
    assert choose_checkpoint(config).start.step == 30
    start = choose_checkpoint(config, [newest]).start
    assert (start.step, start.damaged) == (20, (str(newest),))
    assert choose_checkpoint(config, [newest, before]).start.step == 10
    nothing = choose_checkpoint(config, [newest, before, tmp_path / "global_step10"])
    assert nothing.none_complete
    assert [problem.keys for problem in nothing.problems] == [("save",)]
    plan = replace(small_plan(save=str(tmp_path)), start=start)
    assert f"start     goes on from {before}, step 20\n" in format_plan(plan)
    assert plan_as_dict(plan)["checkpoint"]["step"] == 20
    restored = ChosenStart.from_json(json.loads(json.dumps(start.to_json())))
    assert restored == start


def test_a_step_without_another_load_is_one_of_save(tmp_path: Path) -> None:
    config = make_config(save=str(tmp_path))
    for step in (120, 300):
        put(tmp_path, step, config)
    for load in ({}, {"load": str(tmp_path)}):
        decided = choose_checkpoint(make_config(save=str(tmp_path), iteration=120, **load))
        assert decided.start.checkpoint == str(tmp_path / "global_step120")
        assert decided.start.own_directory  # so that later ones move to superseded/
        applied = apply_decisions(make_config(save=str(tmp_path), iteration=120, **load), decided.decisions)
        assert applied.checkpoint.iteration == 120
        assert choose_checkpoint(applied).start == decided.start
    absent = choose_checkpoint(make_config(save=str(tmp_path), iteration=7))
    assert absent.problems[0].keys[0] == "iteration"
    assert "global_step120" in absent.problems[0].message
    new = str(tmp_path / "new")
    for load in ({}, {"load": new}):
        nothing = choose_checkpoint(make_config(save=new, iteration=7, **load))
        assert nothing.problems[0].keys[0] == "iteration"


def test_a_step_beside_another_load_counts_for_the_first_start(tmp_path: Path) -> None:
    base, save = tmp_path / "base", tmp_path / "run"
    for step in (120, 300):
        put(base, step, make_config())
    config = make_config(save=str(save), load=str(base), iteration=120, finetune=True)
    first = choose_checkpoint(config).start
    assert (first.mode, first.checkpoint, first.step) == (StartMode.FINETUNE, str(base / "global_step120"), 0)
    put(save, 5, config)
    later = choose_checkpoint(config)
    assert (later.start.mode, later.start.step) == (StartMode.RESUME, 5)
    assert not apply_decisions(config, later.decisions).given("iteration")


@pytest.mark.parametrize(
    ("keys", "mode", "step"),
    [
        ({}, StartMode.RESUME, 8),
        ({"no_load_optim": True}, StartMode.WEIGHTS, 8),
        ({"finetune": True}, StartMode.FINETUNE, 0),
        ({"finetune": True, "no_load_optim": True}, StartMode.FINETUNE, 0),
    ],
)
def test_what_is_taken_from_another_run(tmp_path: Path, keys: dict[str, Any], mode: StartMode, step: int) -> None:
    put(tmp_path / "base", 8, make_config())
    decided = choose_checkpoint(make_config(save=str(tmp_path / "run"), load=str(tmp_path / "base"), **keys))
    assert (decided.start.mode, decided.start.step, decided.start.own_directory) == (mode, step, False)
    assert (decided.loaded is None) is (mode is StartMode.FINETUNE)


def test_overwrite_begins_anew_and_says_what_moves(tmp_path: Path) -> None:
    config = make_config(save=str(tmp_path), overwrite=True)
    put(tmp_path, 8, config)
    start = choose_checkpoint(config).start
    assert (start.mode, start.replaces_save) == (StartMode.NEW, True)


@pytest.mark.parametrize("form", ["directory", "checkpoint", "link"])
def test_overwrite_does_not_move_the_checkpoint_that_is_loaded(tmp_path: Path, form: str) -> None:
    """The weights would be read from a place that the start has emptied."""
    save = tmp_path / "run"
    checkpoint = put(save, 8, make_config())
    (checkpoint / "layer_00-model_00-model_states.pt").touch()
    (tmp_path / "link").symlink_to(checkpoint)
    load = {"directory": save, "checkpoint": checkpoint, "link": tmp_path / "link"}[form]
    keys = {"save": str(save), "load": str(load), "finetune": True}
    refused = choose_checkpoint(make_config(**keys, overwrite=True))
    assert [problem.keys for problem in refused.problems] == [("overwrite", "load", "save")]
    moved = save / "superseded" / "global_step8"
    moved.parent.mkdir()
    checkpoint.rename(moved)
    allowed = choose_checkpoint(make_config(**{**keys, "load": str(moved)}, overwrite=True))
    assert not allowed.problems
    assert allowed.start.checkpoint == str(moved)


def test_a_step_is_not_another_one_of_a_checkpoint_that_load_names(tmp_path: Path) -> None:
    checkpoint = put(tmp_path, 8, make_config())
    (checkpoint / "layer_00-model_00-model_states.pt").touch()
    for step, found in ((8, checkpoint), (None, checkpoint), (7, None)):
        assert newest_checkpoint(checkpoint, step) == found
    config = make_config(load=str(checkpoint), iteration=7)
    assert choose_checkpoint(config).start.checkpoint is None
    [problem] = checkpoint_problems(config, training=True)
    assert problem.keys[0] == "iteration"


def test_latest_may_name_a_link_to_a_checkpoint(tmp_path: Path) -> None:
    """Later checkpoints move away only if the name tells the step; and `best` leads to another one later."""
    config = make_config(save=str(tmp_path))
    for step in (10, 20):
        put(tmp_path, step, config)
    (tmp_path / "best").symlink_to("global_step10")
    (tmp_path / "latest").write_text("best")
    start = choose_checkpoint(config).start
    assert (start.checkpoint, start.step) == (str(tmp_path / "global_step10"), 10)
