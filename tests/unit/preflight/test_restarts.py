"""Configuration of the next start of a failed training."""

from __future__ import annotations

from pathlib import Path

import pytest

from neox.config import NeoXConfig
from neox.launch.agent.agent_files import Cause, FailureReport
from neox.launch.spec import Host, LaunchSpec
from neox.launch.supervisor.outcome import EndKind, RunEnd
from neox.preflight.restarts import Restarts
from neox.run_events import interruptions, read_events
from tests.plans import SMALL


def test_checkpoints_to_overwrite_are_moved_by_the_start_that_gets_so_far(tmp_path: Path) -> None:
    config = NeoXConfig.from_flat({**SMALL, "save": str(tmp_path), "overwrite": True, "max_restarts": 2})
    for step in (6, 9):
        (tmp_path / f"global_step{step}").mkdir()
    (tmp_path / "latest").write_text("global_step9")
    restarts = Restarts(config, Path("train.py"))
    assert restarts.next_config().checkpoint.overwrite  # the first start failed before it moved them
    (tmp_path / "latest").unlink()
    (tmp_path / "global_step9").rename(tmp_path / "moved")
    assert restarts.next_config().checkpoint.overwrite  # it may have died before it moved the rest
    (tmp_path / "global_step6").rename(tmp_path / "moved too")
    (tmp_path / "global_step6").mkdir()  # of this run, which died before it wrote `latest`
    assert not restarts.next_config().checkpoint.overwrite


def test_keys_about_the_first_checkpoint_end_with_the_first_start(tmp_path: Path) -> None:
    keys = {**SMALL, "save": str(tmp_path), "load": str(tmp_path), "no_load_optim": True, "iteration": 4}
    (tmp_path / "global_step4").mkdir()
    restarts = Restarts(NeoXConfig.from_flat({**keys, "max_restarts": 2}), Path("train.py"))
    assert restarts.next_config().checkpoint.no_load_optim
    (tmp_path / "global_step8").mkdir()
    assert not restarts.next_config().checkpoint.no_load_optim
    assert restarts.next_config().checkpoint.iteration is None


def end(kind: EndKind, step: int, *preempted: str) -> RunEnd:
    return RunEnd(kind, 0, "a notice", hosts=preempted, step=step, preempted=preempted)


def test_preempted_hosts_are_left_out_of_the_next_start(tmp_path: Path) -> None:
    config = NeoXConfig.from_flat({**SMALL, "save": str(tmp_path), "max_restarts": 9})
    restarts = Restarts(config, Path("train.py"))
    restarts.can_move = True
    assert restarts.decide(end(EndKind.PREEMPTED, 5, "a", "b"), tmp_path).restart
    assert set(restarts.hosts.unfit) == {"a", "b"}
    assert restarts.decide(RunEnd(EndKind.RANK, 137, "rank failed", 0, ("c",), 7, preempted=("c",)), tmp_path).restart
    assert set(restarts.hosts.unfit) == {"c"}
    assert read_events(tmp_path)[-1]["step"] == 7


def test_lost_hosts_are_awaited_until_a_start(tmp_path: Path) -> None:
    config = NeoXConfig.from_flat({**SMALL, "save": str(tmp_path), "max_restarts": 9})
    restarts = Restarts(config, Path("train.py"))
    for kind, name, awaited in (
        (EndKind.HOST, "a", {"a"}),
        (EndKind.NOT_STARTED, "b", {"a", "b"}),
        (EndKind.RANK, "c", set()),
        (EndKind.NOT_STARTED, "b", {"b"}),
    ):
        assert restarts.decide(RunEnd(kind, 1, "a cause", hosts=(name,)), tmp_path).restart
        assert restarts.hosts.awaited == awaited


def test_another_number_of_ranks_is_recorded_with_its_batch(tmp_path: Path) -> None:
    restarts = Restarts(NeoXConfig.from_flat({**SMALL, "save": str(tmp_path), "max_restarts": 9}), Path("train.py"))
    for ranks, samples in ((4, 8), (4, 8), (2, 8), (1, 4)):
        hosts = (Host("a", tuple(range(ranks))),)
        spec = LaunchSpec("id", hosts, "127.0.0.1", 29500, "train.py", (), "/", "/", str(tmp_path), "python")
        restarts.record_start(spec, tmp_path, {}, samples)
    changes = [event["reason"] for event in read_events(tmp_path) if event["event"] == "ranks changed"]
    assert changes == [
        "2 ranks instead of 4, with the same batch",
        "1 ranks instead of 2, with a batch of 4 samples instead of 8",
    ]


def test_tries_without_a_start_make_no_suspect(tmp_path: Path) -> None:
    config = NeoXConfig.from_flat({**SMALL, "save": str(tmp_path), "max_restarts": 9})
    restarts = Restarts(config, Path("train.py"))
    for _ in range(4):
        assert restarts.decide(RunEnd(EndKind.NOT_STARTED, 1, "no answer from a", hosts=("a",)), tmp_path).restart
    assert not restarts.hosts.suspects
    assert not interruptions(read_events(tmp_path))


def stale(checkpoint: str | None) -> RunEnd:
    return RunEnd(EndKind.RANK, 75, "stale", 0, ("a",), report=FailureReport(Cause.STALE_START, checkpoint=checkpoint))


def test_a_start_that_does_not_hold_is_decided_again_without_a_restart(tmp_path: Path) -> None:
    for step in (4, 8):
        (tmp_path / f"global_step{step}").mkdir()
    restarts = Restarts(NeoXConfig.from_flat({**SMALL, "save": str(tmp_path)}), Path("train.py"))  # max_restarts is 0
    damaged = tmp_path / "global_step8"
    assert restarts.decide(stale(str(damaged)), tmp_path).restart
    assert restarts.damaged == (damaged,)
    damaged.rename(tmp_path / "aside")
    damaged.mkdir()  # saved again
    assert restarts.damaged == ()
    for left in (False, True):  # where rank 0 sees another one twice, it decides
        assert restarts.decide(stale(None), tmp_path).restart
        assert restarts.start_left_to_ranks is left
    assert not restarts.decide(RunEnd(EndKind.RANK, 1, "failed", 0, ("a",)), tmp_path).restart
    assert restarts.start_left_to_ranks
    starts = [restarts.decide(stale(None), tmp_path).restart for _ in range(30)]
    assert starts[0]
    assert not starts[-1]


def failed(step: int | None) -> RunEnd:
    return RunEnd(EndKind.RANK, 1, "failed", 0, ("a",), step)


def test_checkpoints_that_only_the_hosts_see_are_not_moved_by_a_restart(tmp_path: Path) -> None:
    keys = {**SMALL, "save": str(tmp_path / "disk of the hosts"), "max_restarts": 9}
    first = {"overwrite": {"overwrite": True}, "iteration": {"iteration": 4}, "no_load_optim": {"no_load_optim": True}}
    for key, given in first.items():
        restarts = Restarts(NeoXConfig.from_flat({**keys, **given}), Path("train.py"))
        assert restarts.decide(failed(None), tmp_path).restart  # it may have failed before it moved anything
        assert restarts.next_config().given(key)
        assert restarts.decide(failed(7), tmp_path).restart
        assert restarts.next_config().given(key) == (key == "no_load_optim")


def test_a_step_that_was_damaged_counts_once_the_run_has_trained_again(tmp_path: Path) -> None:
    """The launcher cannot tell by inode that hosts have replaced it on disks of their own."""
    keys = {**SMALL, "save": str(tmp_path / "disk of the hosts"), "max_restarts": 9}
    restarts = Restarts(NeoXConfig.from_flat(keys), Path("train.py"))
    damaged = tmp_path / "disk of the hosts" / "global_step8"
    restarts.decide(stale(str(damaged)), tmp_path)
    restarts.decide(failed(None), tmp_path)
    assert restarts.damaged == (damaged,)
    restarts.decide(failed(7), tmp_path)
    assert restarts.damaged == ()


def test_a_restart_without_a_complete_checkpoint_is_not_said_to_begin_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "global_step8"
    damaged.mkdir()
    restarts = Restarts(NeoXConfig.from_flat({**SMALL, "save": str(tmp_path), "load": str(tmp_path)}), Path("train.py"))
    restarts.decide(stale(str(damaged)), tmp_path)
    assert "beginning" not in capsys.readouterr().err
