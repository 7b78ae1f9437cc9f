"""Configuration of the next start of a failed training."""

from __future__ import annotations

from pathlib import Path

from neox.config import NeoXConfig
from neox.preflight.restarts import Restarts
from tests.plans import SMALL


def test_checkpoints_to_overwrite_are_moved_by_the_start_that_gets_so_far(tmp_path: Path) -> None:
    config = NeoXConfig.from_flat({**SMALL, "save": str(tmp_path), "overwrite": True, "max_restarts": 2})
    assert not Restarts(config, Path("train.py")).next_config().given("overwrite")
    latest = tmp_path / "latest"
    latest.write_text("global_step9")
    restarts = Restarts(config, Path("train.py"))
    assert restarts.next_config().checkpoint.overwrite  # the first start failed before it moved them
    latest.unlink()
    assert not restarts.next_config().checkpoint.overwrite
    latest.write_text("global_step2")  # of this run
    assert not restarts.next_config().checkpoint.overwrite
