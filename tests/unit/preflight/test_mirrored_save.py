"""Runs whose `save` is an address: a local directory, its mirror, and what the mirror says before a start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neox.checkpoint import commit, stage_directory
from neox.checkpoint.remote.mirror import SUPERSEDED_MANIFEST, Mirror
from neox.config import NeoXConfig
from neox.engine import TrainState
from neox.errors import CheckpointError, ConfigError
from neox.features.mirror_uploads.run import MirrorUploads
from neox.plan import with_trained_model
from neox.plan.run_identity import RUN_FILE, identity_text, run_identity
from neox.preflight.remote_checkpoints import planned_load, with_local_load
from tests.plans import SMALL, small_plan
from tests.resumed_runs import decided_run
from tests.unit.corpus.s3_server import FailingApp, error, s3_server

RUN = "s3://bucket/run"
SAVE = Path("runs/saved/s3/bucket/run")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FailingApp]:
    monkeypatch.setattr("neox.storage.FIRST_PAUSE", 0.001)
    monkeypatch.chdir(tmp_path)
    with s3_server(monkeypatch) as app:
        yield app


def make_config(**keys: Any) -> NeoXConfig:
    return NeoXConfig.from_flat({**SMALL, "save": RUN, **keys})


def put_checkpoint(save: Path, step: int, config: NeoXConfig) -> Path:
    staged = stage_directory(save, step)
    (staged / "layer_00-model_00-model_states.pt").write_bytes(b"x" * step)
    (staged / RUN_FILE).write_text(identity_text(run_identity(config)))
    (staged / "configs").mkdir()
    (staged / "configs" / "config.yml").write_text(json.dumps(config.to_flat()))
    return commit(staged)


def resumed_step(config: NeoXConfig) -> str | None:
    """The checkpoint with which a start goes on."""
    started = decided_run(with_local_load(config, trains=True)).config
    if started.checkpoint.load is None:
        return None
    return (Path(started.checkpoint.load) / "latest").read_text()


def test_an_address_stands_for_a_directory_and_its_mirror() -> None:
    keys = make_config().checkpoint
    assert (keys.save, keys.checkpoint_mirror) == (str(SAVE), RUN)
    again = NeoXConfig.from_flat(make_config().to_flat())
    assert again.checkpoint == keys
    aliased = make_config(s3_path=f"{RUN}/")
    assert aliased.checkpoint.save == str(SAVE)
    assert aliased.checkpoint.checkpoint_mirror == f"{RUN}/"


@pytest.mark.parametrize(
    "keys",
    [
        {"save": "https://host/run"},
        {"save": "hf://models/org/name"},
        {"save": "file:///disk/run"},
        {"save": "s3://bucket/run/global_step3"},
        {"save": "s3://"},
        {"checkpoint_mirror": "s3://bucket/other"},
        {"s3_path": "s3://bucket/other"},
    ],
)
def test_addresses_that_cannot_hold_a_run_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config(**keys)
    assert refused.value.problems[0].keys[0] == "save"


def test_a_run_goes_on_on_hosts_without_the_old_disk(s3: FailingApp, tmp_path: Path) -> None:
    config = make_config()
    assert resumed_step(config) is None
    assert not SAVE.exists()
    for step in (1, 2):
        Mirror(RUN).upload(put_checkpoint(SAVE, step, config))
    assert resumed_step(config) == "global_step2"
    shutil.rmtree(SAVE)
    planned = planned_load(config, trains=True)
    assert planned.config.checkpoint.load == str(SAVE)
    assert len(planned.notes) == 1
    assert not SAVE.exists()
    assert resumed_step(config) == "global_step2"
    shutil.rmtree(SAVE)
    put_checkpoint(SAVE, 1, config)  # an older copy
    assert resumed_step(config) == "global_step2"
    put_checkpoint(SAVE, 3, config)  # a newer one
    requests = len(s3.requests)
    assert resumed_step(config) == "global_step3"
    assert not any("global_step" in path for _, path in s3.requests[requests:])
    assert planned_load(config, trains=True).notes == ()


def test_the_start_of_a_run_is_the_same_on_every_machine(s3: FailingApp, tmp_path: Path, monkeypatch) -> None:
    base = put_checkpoint(tmp_path / "base", 7, make_config())
    Mirror("s3://bucket/base").upload(base)
    config = make_config(load="s3://bucket/base", finetune=True)
    first = with_local_load(config, trains=True)
    assert first.checkpoint.load == "runs/fetched/s3/bucket/base"
    Mirror(RUN).upload(put_checkpoint(SAVE, 4, first))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resumed_step(config) == "global_step4"
    assert not Path("runs/fetched").exists()  # what it was tuned from is not needed


@pytest.mark.parametrize("local", [None, 3])
def test_another_run_in_the_bucket_is_refused(s3: FailingApp, tmp_path: Path, local: int | None) -> None:
    other = make_config(seed=5)
    Mirror(RUN).upload(put_checkpoint(tmp_path / "other", 6, other))
    config = make_config()
    if local is not None:
        put_checkpoint(SAVE, local, config)
    with pytest.raises(ConfigError) as refused:
        with_local_load(config, trains=True)
    assert [problem.keys[0] for problem in refused.value.problems] == ["save"]
    assert RUN in str(refused.value)
    assert [problem.keys[0] for problem in planned_load(config, trains=True).problems] == ["save"]
    assert resumed_step(other) == "global_step6"


def test_overwriting_leaves_nothing_in_the_bucket_that_counts(s3: FailingApp, tmp_path: Path) -> None:
    mirror = Mirror(RUN)
    for step in (1, 6):
        mirror.upload(put_checkpoint(tmp_path / "other", step, make_config(seed=5)))
    config = make_config(overwrite=True)
    assert with_local_load(config, trains=True) == config
    uploads = MirrorUploads(small_plan(save=RUN, overwrite=True))
    uploads.on_start(TrainState())
    uploads.on_exit()
    assert mirror.iterations() == []
    assert resumed_step(make_config()) is None
    names = {name.rpartition("/")[2] for name in mirror._where.find("bucket/run/global_step1")}
    assert SUPERSEDED_MANIFEST in names
    assert "layer_00-model_00-model_states.pt" in names


def test_a_bucket_that_is_gone_stops_only_a_run_that_has_nothing_else(s3: FailingApp) -> None:
    config = make_config()
    s3.fail = lambda number, method, path: error("403 Forbidden", "ExpiredToken")
    with pytest.raises(CheckpointError, match=RUN):
        with_local_load(config, trains=True)
    assert [problem.keys for problem in planned_load(config, trains=True).problems] == [("checkpoint_mirror",)]
    put_checkpoint(SAVE, 2, config)
    assert resumed_step(config) == "global_step2"


def test_text_and_evaluation_read_the_bucket_if_there_is_no_directory(s3: FailingApp) -> None:
    config = make_config(load="base", finetune=True)
    assert with_trained_model(make_config()).checkpoint.load == RUN
    assert with_trained_model(config).checkpoint.load == RUN
    assert not with_trained_model(config).checkpoint.finetune
    assert with_trained_model(make_config(load="base")).checkpoint.load == "base"
    put_checkpoint(SAVE, 2, make_config())
    assert with_trained_model(config).checkpoint.load == str(SAVE)
    assert with_trained_model(make_config()).checkpoint.load is None
