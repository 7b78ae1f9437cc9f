"""Where ranks go when nothing, too little or something impossible is said about hosts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from neox.config import NeoXConfig
from neox.errors import ConfigError, LaunchError
from neox.head.hosts import choose_hosts


@pytest.fixture(autouse=True)
def _nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("DLTS_HOSTFILE", raising=False)


def choose(dry_run: bool = True, hosts: int | None = None, gpus: int | None = None, **keys: Any) -> tuple[int, str]:
    config = NeoXConfig.from_flat({"pipe_parallel_size": 4, "model_parallel_size": 2, **keys})
    placement, warnings = choose_hosts(config, Namespace(dry_run=dry_run, hosts=hosts, gpus=gpus))
    return placement.world_size, "\n".join(warnings)


def test_a_dry_run_assumes_what_is_not_said() -> None:
    config = NeoXConfig.from_flat({"pipe_parallel_size": 2, "num_gpus": 2})
    asked = Namespace(dry_run=True, hosts=None, gpus=None)
    assert choose_hosts(config, asked)[0].why == "num_gpus"
    config = NeoXConfig.from_flat({"pipe_parallel_size": 2, "num_gpus": 2, "hostfile": "none"})
    assert choose_hosts(config, asked)[0].why == "assumed"
    ranks, warning = choose()
    assert ranks == 8
    assert "8 ranks are assumed, one copy of the model" in warning
    assert choose(global_num_gpus=96) == choose(global_num_gpus=96, num_gpus=96) == (96, "")
    ranks, warning = choose(global_num_gpus=96, num_gpus=8)
    assert ranks == 96
    assert "`num_gpus: 8` has no effect: without a hostfile `global_num_gpus: 96` counts" in warning
    ranks, warning = choose(hostfile="none", global_num_gpus=16)
    assert ranks == 16
    assert warning.startswith("hostfile none does not exist")
    assert choose(hosts=12, gpus=8) == (96, "")
    with pytest.raises(LaunchError, match="at most"):
        choose(hosts=10**9)


def test_a_launch_assumes_nothing(tmp_path: Path) -> None:
    assert choose(dry_run=False) == (1, "")  # which the grid refuses
    with pytest.raises(ConfigError) as caught:
        choose(dry_run=False, hostfile="none", norm="rmsnorm")
    assert "rmsnorm" in str(caught.value)
    assert "hostfile none does not exist" in caught.value.problems[-1]
