"""The launcher's decision about a start, verified by the ranks before anything is changed."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from neox.decisions.checkpoint import choose_checkpoint
from neox.errors import CheckpointError, StaleStartError
from neox.plan import RunPlan, decode_payload, encode_payload
from neox.plan.run_identity import RUN_FILE
from neox.plan.run_start import ChosenStart, StartMode
from neox.storage import cache_folder
from neox.train.failures import failure_report
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import tiny_plan
from tests.unit.decisions.test_checkpoint import LATEST, put

FOLLOWED = "NEOX_LAUNCHER"


def planned(save: Path | str, **keys: object) -> RunPlan:
    """The plan that a launcher sends to the ranks, with its decision."""
    plan = tiny_plan(1, save=str(save), load=str(save), **keys)
    return decode_payload(encode_payload(replace(plan, start=choose_checkpoint(plan.config).start)))


def entries(save: Path) -> set[str]:
    return {path.name for path in save.iterdir()}


def test_a_checkpoint_that_is_added_between_plan_and_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from neox.engine.checkpoints.run_start import verified_choice

    put(tmp_path, 10, tiny_plan(1).config)
    plan = planned(tmp_path)
    assert plan.start == ChosenStart(
        StartMode.RESUME, str(tmp_path), str(tmp_path / "global_step10"), 10, own_directory=True
    )
    monkeypatch.setenv(FOLLOWED, "1")
    assert verified_choice(plan) == (plan.start, ())
    put(tmp_path, 20, tiny_plan(1).config)
    before = entries(tmp_path)
    with pytest.raises(StaleStartError) as stale:
        verified_choice(plan)
    assert stale.value.exit_code == 75
    assert entries(tmp_path) == before
    report = failure_report(stale.value)
    assert report is not None
    assert (report.cause, report.checkpoint) == ("stale start", None)
    left = replace(plan, start=replace(plan.start, left_to_ranks=True))  # the launcher does not see the directory
    assert verified_choice(left)[0].step == 20
    monkeypatch.delenv(FOLLOWED)  # a requeue of an old payload, after further saves
    assert verified_choice(plan)[0].step == 20


@pytest.mark.parametrize("directory", LATEST)
def test_launcher_and_ranks_see_the_same(tmp_path: Path, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from neox.engine.checkpoints.run_start import verified_choice

    put(tmp_path, 10, tiny_plan(1).config)
    LATEST[directory](tmp_path)
    monkeypatch.setenv(FOLLOWED, "1")
    plan = planned(tmp_path)
    assert verified_choice(plan)[0] == plan.start


def test_a_checkpoint_that_the_launcher_did_not_see_decides_warm_up_and_precision(tmp_path: Path) -> None:
    from neox.engine.checkpoints.run_start import verified_choice

    keys = {"lr_decay_style": "constant", "warmup": 0.5, "lr_decay_iters": None}
    plan = planned(tmp_path, train_iters=40, **keys)
    put(tmp_path, 10, tiny_plan(1, save=str(tmp_path), train_iters=10, **keys).config)
    start, decisions = verified_choice(plan)
    assert start.step == 10
    assert {decision.key: decision.value for decision in decisions} == {"lr_warmup_iters": 5.0}


def test_a_run_in_save_is_resumed_although_its_first_checkpoint_cannot_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from neox.engine.checkpoints import run_start

    cache = tmp_path / "cache"
    keys = {"load": str(cache_folder("s3://bucket/base", cache)), "checkpoint_cache_dir": str(cache)}
    plan = tiny_plan(1, save=str(tmp_path / "save"), **keys)
    put(tmp_path / "save", 10, plan.config)

    def refuse(*arguments: object) -> None:
        raise CheckpointError("no access")

    monkeypatch.setattr(run_start, "find_remote", refuse)
    assert run_start.verified_choice(plan)[0].step == 10
    shutil.rmtree(tmp_path / "save")
    with pytest.raises(CheckpointError, match="no access"):
        run_start.verified_choice(plan)


def agreed(directories: list[Path], followed: str) -> object:
    """The step on which two machines with disks of their own agree, or the checkpoint that is damaged."""
    import torch.distributed as dist

    from neox.engine.checkpoints.run_start import agree_on_start

    rank = dist.get_rank()
    os.environ[FOLLOWED] = followed
    os.chdir(directories[rank])
    socket.gethostname = lambda: f"machine{rank}"
    plan = tiny_plan(2, save="ck", load="ck")
    try:
        return agree_on_start(plan)[1].step
    except StaleStartError as error:
        return error.damaged


def test_a_checkpoint_that_is_damaged_on_one_host_only(tmp_path: Path) -> None:
    for step in (10, 20):
        put(tmp_path / "one" / "ck", step, tiny_plan(1).config)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    file = tmp_path / "two" / "ck" / "global_step20" / RUN_FILE
    content = bytearray(file.read_bytes())
    content[-3] ^= 1  # the size stays
    file.write_bytes(content)
    hosts = [tmp_path / "one", tmp_path / "two"]
    assert run_ranks(2, agreed, hosts, "1") == ["ck/global_step20"] * 2  # the launcher leaves it out
    assert run_ranks(2, agreed, hosts, "") == [10, 10]  # nobody would start again
