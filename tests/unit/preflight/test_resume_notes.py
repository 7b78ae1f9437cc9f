"""Identity of runs: which changes make another run, and what a `save` directory says before a start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neox.checkpoint_files.manifest import write_manifest
from neox.checkpoint_files.names import mp_rank_file
from neox.config import NeoXConfig
from neox.launch.supervisor.outcome import EndKind
from neox.metrics import METRICS_FILE
from neox.plan import format_plan, plan_as_dict
from neox.plan.rules.notes import notes_without_effect
from neox.plan.run_identity import (
    RUN_FILE,
    changed_keys,
    find_run,
    identity_text,
    other_run_message,
    run_identity,
    starting_weights,
)
from neox.preflight.resume_notes import batch_note, finished_note, unfinished_note
from neox.run_events import append_event
from tests.plans import SMALL, small_plan
from tests.resumed_runs import decided_run


def make_config(**keys: Any) -> NeoXConfig:
    return NeoXConfig.from_flat({**SMALL, **keys})


def put_checkpoint(save: Path, step: int, config: NeoXConfig) -> None:
    directory = save / f"global_step{step}"
    directory.mkdir(parents=True)
    (directory / mp_rank_file(0)).touch()  # all files of weights that it needs, without a manifest
    (directory / RUN_FILE).write_text(identity_text(run_identity(config)))
    (save / "latest").write_text(directory.name)


def put_config(save: Path, step: int, config: NeoXConfig) -> None:
    directory = save / f"global_step{step}" / "configs"
    directory.mkdir()
    (directory / "config.yml").write_text(json.dumps(config.to_flat()))


@pytest.mark.parametrize(
    ("keys", "same"),
    [
        ({"train_iters": 99}, True),
        ({"train_micro_batch_size_per_gpu": 1}, True),
        ({"data_path": "other"}, True),
        ({"save": "elsewhere"}, True),
        ({"seq_length": 8}, True),
        ({"seed": 5}, False),
        ({"num_layers": 3}, False),
        ({"norm": "rmsnorm"}, False),
        ({"load": "base", "finetune": True}, False),
        ({"load": "base"}, False),
        ({"lora": {"r": 2}}, False),
    ],
)
def test_what_makes_another_run(keys: dict[str, Any], same: bool) -> None:
    assert (run_identity(make_config()).run_id == run_identity(make_config(**keys)).run_id) is same


def test_the_plan_names_the_weights_that_a_run_starts_from(tmp_path: Path) -> None:
    base = make_config(save=str(tmp_path / "base"))
    put_checkpoint(tmp_path / "base", 4, base)
    keys = {"load": str(tmp_path / "base"), "save": str(tmp_path / "own")}
    assert "seed" in starting_weights(base)
    assert f"{tmp_path / 'base' / 'global_step4'}; steps are counted from 0" in starting_weights(
        make_config(**keys, finetune=True)
    )
    assert str(tmp_path / "base" / "global_step2") in starting_weights(make_config(**keys, iteration=2))
    assert "s3://bucket/base" in starting_weights(make_config(load="s3://bucket/base", finetune=True))
    assert "counted from 0 (finetune)" in format_plan(small_plan(**keys, finetune=True))
    assert plan_as_dict(small_plan(**keys, finetune=True))["start"].endswith("(finetune)")


def test_a_run_resumes_its_own_checkpoints(tmp_path: Path) -> None:
    config = make_config(save=str(tmp_path), load="base", finetune=True)
    assert decided_run(config).config == config
    put_checkpoint(tmp_path, 4, config)
    decided = decided_run(config)
    resumed = decided.config
    assert decided.problems == ()
    assert resumed.checkpoint.load == str(tmp_path)
    assert not resumed.checkpoint.finetune
    assert len(decided.notes) == 1


def test_another_runs_checkpoints_are_refused(tmp_path: Path) -> None:
    put_checkpoint(tmp_path, 4, make_config(seed=2))
    config = make_config(save=str(tmp_path))
    assert [problem.keys for problem in decided_run(config).problems] == [("save",)]
    assert decided_run(make_config(save=str(tmp_path), overwrite=True)).problems == ()


@pytest.mark.parametrize(
    ("keys", "same"),
    [
        ({}, True),
        ({"train_iters": 9}, True),
        ({"num_layers": 3}, False),
        ({"lora": {"r": 2}}, False),
        ({"seed": 2}, False),
    ],
)
def test_hash_of_an_older_version_is_no_other_run(tmp_path: Path, keys: dict[str, Any], same: bool) -> None:
    config = make_config(save=str(tmp_path))
    put_checkpoint(tmp_path, 4, config)
    put_config(tmp_path, 4, config)
    run_file = tmp_path / "global_step4" / RUN_FILE
    run_file.write_text(identity_text(replace(run_identity(config), run_id="of 0.1")))
    decided = decided_run(make_config(save=str(tmp_path), **keys))
    assert (decided.problems == ()) is same


def test_checkpoints_without_an_identity_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "global_step3" / mp_rank_file(0)).touch()
    found = find_run(tmp_path)
    assert found is not None
    assert (found.iteration, found.identity) == (3, None)
    assert decided_run(make_config(save=str(tmp_path))).problems != ()
    assert decided_run(make_config(save=str(tmp_path), load=str(tmp_path))).problems == ()


def test_a_checkpoint_whose_replacement_was_killed_is_one_of_the_run(tmp_path: Path) -> None:
    config = make_config(save=str(tmp_path))
    put_checkpoint(tmp_path, 4, config)
    aside = tmp_path / ".replaced-global_step4"
    (tmp_path / "global_step4").rename(aside)
    found = find_run(tmp_path)
    assert found is not None
    assert (found.checkpoint, found.iteration, found.identity) == (aside, 4, run_identity(config))
    put_checkpoint(tmp_path, 4, config)
    found = find_run(tmp_path)
    assert found is not None
    assert found.checkpoint == tmp_path / "global_step4"


def test_latest_decides_which_checkpoint_is_resumed(tmp_path: Path) -> None:
    config = make_config(save=str(tmp_path))
    put_checkpoint(tmp_path, 4, config)
    put_checkpoint(tmp_path, 2, config)
    found = find_run(tmp_path)
    assert found is not None
    assert found.iteration == 2


def finished(directory: Path, **keys: Any) -> str | None:
    """What is said at a start with two steps in all; the run directory is `directory`/run."""
    config = make_config(save=str(directory / "save"), **{"train_iters": 2, **keys})
    return finished_note(decided_run(config).config, directory / "run")


def put_complete_checkpoint(directory: Path, step: int) -> Path:
    save = directory / "save"
    put_checkpoint(save, step, make_config(save=str(save)))
    write_manifest(save / f"global_step{step}", step, step)
    return save / f"global_step{step}"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, True),
        ({"seed": 1234}, True),
        ({"train_micro_batch_size_per_gpu": 1}, True),
        ({"train_iters": 3}, False),
        ({"train_iters": 0}, False),
        ({"overwrite": True}, False),
        ({"iteration": 1, "load": "save"}, False),
        ({"checkpoint_mirror": "s3://bucket/run"}, False),
    ],
)
def test_a_run_with_all_steps_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], said: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    assert finished(Path()) is None
    put_complete_checkpoint(Path(), 1)
    assert finished(Path()) is None
    put_complete_checkpoint(Path(), 2)
    assert (finished(Path(), **keys) is not None) is said


@pytest.mark.parametrize(
    ("keys", "changed"),
    [
        ({}, False),
        ({"save_best": "validation/lm_loss", "save_best_goal": "max"}, True),
        ({"eval_tasks": ["lambada_openai"]}, True),
        ({"num_gpus": 1, "load": "save"}, False),
    ],
)
def test_a_finished_run_names_what_has_changed_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], changed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    put_complete_checkpoint(Path(), 2)
    put_config(Path("save"), 2, make_config(save="save", train_iters=2))
    said = str(finished(Path(), **keys))
    assert ("no effect" in said) == changed
    if changed:
        assert all(f"{key} unset -> " in said for key in keys)


def test_steps_of_a_warm_up_that_a_longer_run_keeps_are_no_change_and_no_line_of_the_user(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"save": str(tmp_path), "load": str(tmp_path), "warmup": 0.1, "lr_decay_iters": None}
    before = make_config(**keys, train_iters=6)
    put_checkpoint(tmp_path, 6, before)
    put_config(tmp_path, 6, before)
    resumed = decided_run(make_config(**keys, train_iters=60))
    assert resumed.config.schedule.lr_warmup_iters == pytest.approx(0.6)
    said = [*resumed.notes, *(note.message for note in notes_without_effect(resumed.config))]
    assert not any("lr_warmup_iters" in line for line in said)
    assert any("train_iters 6 -> 60" in line for line in said)
    assert sum("warmup" in line for line in said) == 1
    given = make_config(**keys, train_iters=60, lr_warmup_iters=3)
    assert any("lr_warmup_iters unset -> 3" in line for line in decided_run(given).notes)


def test_a_run_that_was_asked_to_end_says_how_to_go_on(tmp_path: Path) -> None:
    def said(**keys: Any) -> str | None:
        return unfinished_note(make_config(save=str(tmp_path), train_iters=60, **keys), tmp_path)

    assert said() is None
    put_checkpoint(tmp_path, 45, make_config())
    text = said()
    assert text is not None
    assert "45 of 60" in text
    assert "--overwrite" not in text
    assert "--overwrite" in str(said(overwrite=True))
    put_checkpoint(tmp_path, 60, make_config())
    assert said() is None
    rows = [("validation", "validation", 30), ("step", "train", 60)]
    lines = [json.dumps({"iteration": at, "kind": kind, f"{group}/lm_loss": 2.0}) + "\n" for kind, group, at in rows]
    (tmp_path / METRICS_FILE).write_text("".join(lines))
    assert "no evaluation after the last" in str(said())


def test_only_what_has_changed_is_named(tmp_path: Path) -> None:
    optimizer = {"type": "Adam", "params": {"lr": 6e-4, "betas": [0.9, 0.95]}}
    put_checkpoint(tmp_path, 4, make_config())
    put_config(tmp_path, 4, make_config(optimizer=optimizer, precision="bf16"))
    found = find_run(tmp_path)
    assert found is not None
    reordered = {"params": {"betas": [0.9, 0.95], "lr": 1e-4}, "type": "Adam"}
    changes = list(changed_keys(make_config(optimizer=reordered, precision="auto"), found))
    assert changes == ["optimizer.params.lr 0.0006 -> 0.0001"]


def test_a_run_of_muon_that_moved_whole_products_is_named(tmp_path: Path) -> None:
    muon = {"type": "Muon", "params": {"lr": 1e-3}}
    put_checkpoint(tmp_path, 4, make_config())
    put_config(tmp_path, 4, make_config(optimizer=muon))
    found = find_run(tmp_path)
    assert found is not None
    (change,) = changed_keys(make_config(optimizer=muon), found)
    assert change.startswith("optimizer.params.split_fused false -> true")
    of_today = replace(found, samples_per_step=8)
    assert not list(changed_keys(make_config(optimizer=muon), of_today))


def test_a_run_of_muon_whose_learning_rate_followed_the_width_is_named(tmp_path: Path) -> None:
    muon = {"type": "Muon", "params": {"lr": 1e-3, "split_fused": False}}
    mup = make_config(optimizer=muon, use_mup=True, mup_base_hidden_size=16)
    put_checkpoint(tmp_path, 4, make_config())
    put_config(tmp_path, 4, mup)
    found = find_run(tmp_path)
    assert found is not None
    (change,) = changed_keys(mup, found)
    assert "1 / sqrt(m)" in change
    assert not list(changed_keys(mup, replace(found, samples_per_step=8)))


def test_a_damaged_checkpoint_or_an_interrupted_evaluation_is_not_the_end(tmp_path: Path) -> None:
    checkpoint = put_complete_checkpoint(tmp_path, 2)
    run = tmp_path / "run"
    run.mkdir()
    for status in (130, 0):
        append_event(run, "start")
        assert finished(tmp_path) is None
        append_event(run, "end", status=status)
        assert (finished(tmp_path) is not None) is (status == 0)
    (checkpoint / RUN_FILE).write_text("{}")
    assert finished(tmp_path) is None


@pytest.mark.parametrize("kind", list(EndKind))
def test_a_run_that_was_asked_to_end_after_its_last_step_is_evaluated(tmp_path: Path, kind: EndKind) -> None:
    put_complete_checkpoint(tmp_path, 2)
    run = tmp_path / "run"
    run.mkdir()
    append_event(run, "start")
    append_event(run, "end", kind=kind.value, status=0)
    assert (finished(tmp_path) is None) is (kind in (EndKind.ASKED, EndKind.PREEMPTED))


@pytest.mark.parametrize(
    ("rows", "is_missing"),
    [
        ([("train", 1), ("train", 2)], False),  # without validation data
        ([("train", 1), ("validation", 1), ("train", 2)], True),
        ([("validation", 0), ("train", 1), ("train", 2)], True),
        ([("train", 1), ("train", 2), ("validation", 2)], False),
        ([("train", 1), ("train", 2), ("validation", 2), ("train", 2)], True),  # trained again
        ([("train", 1), ("train", 2), ("validation", 2), ("train", 2), ("validation", 2)], False),
        ([("validation", 2)], False),  # of another run directory's steps
    ],
)
def test_a_run_whose_metrics_lack_the_last_evaluation_has_not_finished(
    tmp_path: Path, rows: list[tuple[str, int]], is_missing: bool
) -> None:
    put_complete_checkpoint(tmp_path, 2)
    run = tmp_path / "run"
    run.mkdir()
    lines = []
    for group, iteration in rows:
        kind = "step" if group == "train" else group
        lines.append(json.dumps({"iteration": iteration, "kind": kind, f"{group}/lm_loss": "nan"}) + "\n")
    (run / METRICS_FILE).write_text("".join(lines))
    append_event(run, "start")
    append_event(run, "end", kind=EndKind.FINISHED.value, status=0)
    assert (finished(tmp_path) is None) is is_missing
    assert finished(tmp_path, eval_iters=0) is not None


def test_a_run_of_another_network_is_not_said_to_start_elsewhere(tmp_path: Path) -> None:
    put_checkpoint(tmp_path, 3, make_config())
    found = find_run(tmp_path)
    assert found is not None
    keys = {"save": str(tmp_path)}
    assert "network" in other_run_message(make_config(**keys, num_layers=3), found)
    assert "seed 5" in other_run_message(make_config(**keys, seed=5), found)


def test_the_keys_of_another_network_are_named(tmp_path: Path) -> None:
    put_checkpoint(tmp_path, 3, make_config())
    put_config(tmp_path, 3, make_config())
    found = find_run(tmp_path)
    assert found is not None
    changed = make_config(save=str(tmp_path), num_layers=3, lora={"r": 2}, train_iters=99)
    message = other_run_message(changed, found)
    assert f"num_layers {SMALL['num_layers']} -> 3" in message
    assert "lora.r unset -> 2" in message
    assert "train_iters" not in message


@pytest.mark.parametrize(("iterations", "jumps"), [(10, False), (40, True)])
def test_a_jump_of_the_learning_rate_is_told(tmp_path: Path, iterations: int, jumps: bool) -> None:
    config = make_config(save=str(tmp_path), lr_decay_iters=10, lr_decay_style="cosine")
    put_checkpoint(tmp_path, 8, config)
    put_config(tmp_path, 8, config)
    again = make_config(save=str(tmp_path), lr_decay_iters=iterations, lr_decay_style="cosine")
    notes = decided_run(again).notes
    assert any("learning rate" in note for note in notes) is jumps


def test_a_resume_with_other_degrees_names_the_samples_of_its_steps(tmp_path: Path) -> None:
    put_checkpoint(tmp_path, 4, make_config())
    keys = {"load": str(tmp_path), "train_micro_batch_size_per_gpu": 2}

    def note_of(ranks: int, **others: object) -> str | None:
        plan = small_plan(ranks, **keys, **others)
        return batch_note(plan, decided_run(plan.config).loaded)

    assert note_of(1) is None, "an older checkpoint does not say it"
    now = small_plan(1, **keys).batch.train_batch_size
    run = tmp_path / "global_step4" / RUN_FILE
    run.write_text(identity_text(run_identity(make_config()), 2 * now))
    assert find_run(tmp_path).samples_per_step == 2 * now
    note = note_of(1)
    assert note is not None
    assert f"{2 * now} -> {now}" in note
    assert note_of(2) is None
    assert note_of(1, finetune=True) is None
