"""Hosts that compute more slowly than the others."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from neox.engine.measurements import BACKWARD, COMMUNICATION, FORWARD, OPTIMIZER, PassTimers
from neox.features.stragglers.run import Reading, slow_hosts
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan


def test_a_slow_host_is_compared_with_hosts_of_its_stage() -> None:
    readings = [Reading(host, 0, 1.0) for host in ("a", "b", "c") for _ in range(2)]
    readings += [Reading("d", 0, 1.0), Reading("d", 0, 1.3)]
    readings += [Reading(host, 1, 5.0) for host in ("e", "f")]
    assert slow_hosts(readings) == {"d": pytest.approx(1.15)}
    assert slow_hosts([Reading("a", 0, 1.0), Reading("b", 0, 1.3)]) == {"b": pytest.approx(1.3)}
    assert slow_hosts([Reading("a", 0, 1.0), Reading("b", 0, 1.09)]) == {}
    assert slow_hosts([Reading("a", 0, 0.0), Reading("b", 1, 2.0)]) == {}


def test_only_passes_count_without_what_waits_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timers = PassTimers(torch.device("cpu"))
    with timers.part(FORWARD):  # 0 to 1
        pass
    with timers.part(BACKWARD), timers.part(COMMUNICATION):  # 2 to 5, and 3 to 4
        pass
    with timers.part(OPTIMIZER), timers.part(COMMUNICATION):
        pass
    assert timers.take_computing() == 1 + 3 - 1
    assert timers.take() == {}
    assert timers.take_computing() == 0


def scalars_of_steps(plan: Any) -> list[dict[str, float]]:
    """Train on this rank, which is a host of its own; rank 1 is slow. Return what it adds to each step."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.features.stragglers.run import Stragglers

    grid, device = initialize_distributed(plan)
    stragglers = Stragglers(plan, host=f"host{grid.rank}")
    engine = initialize_engine(plan, grid, device, lambda *_: [stragglers])
    if grid.rank == 1:
        engine.deepspeed_engine.module.register_forward_hook(lambda *_: time.sleep(0.5))
    data = batches(plan, grid.dp_rank)
    added = []
    for _ in range(2 * plan.config.logging.straggler_steps):
        added.append(dict(engine.train_batch(data).numbers))
    return added


def test_a_slow_host_is_named_after_some_steps() -> None:
    first, second = run_ranks(2, scalars_of_steps, tiny_plan(2, straggler_steps=2))
    assert [list(added) for added in first] == [[], ["runtime/slow_host/host1"]] * 2
    assert all(added["runtime/slow_host/host1"] > 1.1 for added in first[1::2])
    assert second == [{}] * 4
