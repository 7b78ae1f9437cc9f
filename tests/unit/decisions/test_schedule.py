"""`use_checkpoint_lr_scheduler`: the schedule of the checkpoint goes on, and what it replaces is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from neox.config import NeoXConfig
from neox.plan import static_problems
from neox.plan.schedule import schedule_of
from tests.resumed_runs import decided_run
from tests.unit.preflight.test_resume_notes import make_config, put_checkpoint, put_config

USE = {"use_checkpoint_lr_scheduler": True}
OLD: dict[str, Any] = {
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.9, 0.9]}},
    "lr_decay_style": "cosine",
    "min_lr": 0.001,
    "warmup": 0.2,
}


def old_run(folder: Path, **keys: Any) -> NeoXConfig:
    config = make_config(**{**OLD, **keys})
    put_checkpoint(folder, 4, config)
    put_config(folder, 4, config)
    return config


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3, "min_lr": 0.0},
        {"lr_decay_iters": None, "lr_decay_fraction": 0.5, "train_iters": 30},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
    ],
)
def test_the_schedule_of_the_checkpoint_goes_on(tmp_path: Path, keys: dict[str, Any]) -> None:
    before = schedule_of(old_run(tmp_path, **{key: value for key, value in keys.items() if value is not None}))
    config = make_config(load=str(tmp_path), train_iters=50, lr_decay_iters=50, warmup=0.1, **USE)
    own = decided_run(config)
    assert not own.problems
    assert [schedule_of(own.config).lr(step) for step in range(40)] == [before.lr(step) for step in range(40)]
    assert schedule_of(config).lr(4) != before.lr(4)
    (note,) = own.notes
    for named in (str(tmp_path / "global_step4"), "lr_decay_iters", "0.01"):
        assert named in note
    assert own.config.value("optimizer.params.betas") == config.value(
        "optimizer.params.betas"
    )  # only the peak is taken
    assert own.config.training.train_iters == 50


def test_a_resumed_run_keeps_its_schedule_and_notes_no_jump(tmp_path: Path) -> None:
    before = schedule_of(old_run(tmp_path))
    config = make_config(save=str(tmp_path), lr=0.5, optimizer={"type": "Adam"}, **USE)
    own = decided_run(config)
    assert own.config.checkpoint.load == str(tmp_path)
    assert schedule_of(own.config).lr(4) == before.lr(4)
    assert not any("learning rate of the next step" in note for note in own.notes)
    plain = decided_run(make_config(save=str(tmp_path), lr=0.5, optimizer={"type": "Adam"}))
    assert schedule_of(plain.config).lr(4) != before.lr(4)
    assert decided_run(own.config).config == own.config


def test_without_a_checkpoint_the_configuration_counts(tmp_path: Path) -> None:
    for keys in ({}, {"load": str(tmp_path), "save": str(tmp_path)}, {"load": "s3://bucket/run"}):
        own = decided_run(make_config(**keys, **USE))
        assert not own.problems
        assert len(own.notes) == 1
        assert schedule_of(own.config).lr(3) == schedule_of(make_config()).lr(3)


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    (problem,) = static_problems(make_config(load=str(tmp_path), finetune=True, **USE))
    assert set(problem.keys) == {"use_checkpoint_lr_scheduler", "finetune"}
    old_run(tmp_path)
    (problem,) = decided_run(make_config(load=str(tmp_path), override_lr_scheduler=True, **USE)).problems
    assert set(problem.keys) == {"use_checkpoint_lr_scheduler", "override_lr_scheduler"}
    file = tmp_path / "global_step4" / "configs" / "config.yml"
    keys = json.loads(file.read_text())
    del keys["train_iters"]
    del keys["lr_decay_iters"]
    for text in (json.dumps(keys), "a: [", ""):
        file.write_text(text)
        (problem,) = decided_run(make_config(load=str(tmp_path), **USE)).problems
        assert problem.keys == ("use_checkpoint_lr_scheduler",)
