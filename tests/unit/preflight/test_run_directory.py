"""Run directories: whose curves they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neox.config import NeoXConfig
from neox.errors import LaunchError
from neox.plan.run_identity import RUN_FILE, identity_text, run_identity
from neox.preflight.run_directory import claim_curves
from tests.plans import SMALL


def make_config(save: Path, **keys: Any) -> NeoXConfig:
    return NeoXConfig.from_flat({**SMALL, "save": str(save), **keys})


def put_checkpoint(save: Path) -> None:
    checkpoint = save / "global_step4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "mp_rank_00_model_states.pt").touch()
    (checkpoint / RUN_FILE).write_text(identity_text(run_identity(make_config(save))))


def test_a_run_does_not_continue_the_curves_of_another_one(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    first, second = make_config(tmp_path / "a"), make_config(tmp_path / "b")
    assert claim_curves(logs, first) is None
    (logs / "metrics.jsonl").write_text("{}\n")
    put_checkpoint(tmp_path / "a")
    assert claim_curves(logs, first) is None  # goes on
    note = claim_curves(logs, second)  # begins: the first one's curves are moved aside
    assert note is not None
    assert str(tmp_path / "a") in note

    before = (logs / RUN_FILE).read_text()
    put_checkpoint(tmp_path / "b")
    for other in (first, make_config(tmp_path / "c", load=str(tmp_path / "a"))):
        with pytest.raises(LaunchError) as refused:
            claim_curves(logs, other)
        assert "log_dir" in str(refused.value)
        assert str(tmp_path / "b") in str(refused.value)
    assert (logs / RUN_FILE).read_text() == before
    assert claim_curves(logs, make_config(tmp_path / "a", overwrite=True)) is not None


def test_a_run_that_was_moved_goes_on(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    put_checkpoint(tmp_path / "run")
    (logs / "metrics.jsonl").write_text("{}\n")
    claim_curves(logs, make_config(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "moved")
    assert claim_curves(tmp_path / "moved" / "logs", make_config(tmp_path / "moved")) is None


def test_directories_of_older_versions_are_taken_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    put_checkpoint(tmp_path / "a")
    assert claim_curves(tmp_path, make_config(tmp_path / "a")) is None
