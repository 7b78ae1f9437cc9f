"""Summary of recovery in the plan, and spare hosts that a dry run refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.launch import Host
from neox.launch.hosts.placement import ChosenBy, Placement
from neox.preflight.command_line import parse_arguments
from neox.preflight.dry_run import DryRun
from neox.preflight.planning import read_config
from neox.preflight.recovery import recovery_lines
from tests.plans import SMALL

HOSTS = (Host("a", (0, 1)), Host("b", (0, 1)))
SPARE = Host("s", (0, 1), spare=True)


def test_a_line_for_each_kind_of_recovery(tmp_path: Path) -> None:
    plain = Placement(HOSTS, ChosenBy.HOSTFILE, 0, "hostfile of -H")
    assert not list(recovery_lines(NeoXConfig.from_flat(SMALL), plain))
    keys = {**SMALL, "save": str(tmp_path), "max_restarts": 7, "elastic": True, "check_replicas_every": 50}
    keys |= {"loss_spike_action": "rollback", "preemption_file": "notice", "checkpoint_factor": 5}
    lines = list(recovery_lines(NeoXConfig.from_flat(keys), Placement(HOSTS, ChosenBy.HOSTFILE, 0, "", (SPARE,))))
    assert len(lines) == 6
    assert "at most 7" in lines[0]
    assert "s (2 slots)" in lines[1]


def test_a_dry_run_refuses_spare_hosts_that_the_launcher_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("a slots=1\nb slots=1\ns slots=1 spare\n")
    (tmp_path / "run.yml").write_text(json.dumps({**SMALL, "launcher": "openmpi"}))
    words = ["train.py", str(tmp_path / "run.yml"), "-H", str(tmp_path / "hostfile"), "--dry-run"]
    arguments = parse_arguments(words)
    with pytest.raises(ConfigError) as refused:
        DryRun(arguments, read_config(arguments)).show()
    assert refused.value.problems[0].keys == ("launcher",)
