"""Checkpoints in object storage that machines without a shared disk load: each fetches what its ranks read."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from neox.checkpoint import compare_checkpoints, find_checkpoint, open_checkpoint, read_manifest
from neox.checkpoint.remote.mirror import Mirror
from neox.checkpoint_files.manifest import is_unfetched
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan
from tests.unit.corpus.s3_server import KEYS, FailingApp, error, s3_server

RUN = "s3://bucket/run"
MODEL: dict[str, Any] = {"num_layers": 6, "hidden_size": 128, "no_weight_tying": True}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingApp]:
    monkeypatch.setattr("neox.storage.FIRST_PAUSE", 0.001)
    with s3_server(monkeypatch) as app:
        yield app


def train(directory: Path, steps: int, layout: dict[str, int]) -> None:
    """Train some steps from nothing, and save."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint

    plan = tiny_plan(dist.get_world_size(), **MODEL, **layout)
    grid, device = initialize_distributed(plan)
    engine = open_engine(plan, grid, device)
    data = batches(plan, grid.dp_rank)
    for _ in range(steps):
        engine.train_batch(data)
    save_checkpoint(engine, directory)


def go_on(
    machines: list[Path], load: str, save: Path, layout: dict[str, Any], endpoint: str, launcher: int = 0
) -> dict[str, int]:
    """Load a checkpoint, train a step, and save it.

    Args:
        machines: Working directories of the ranks. If there are several, each rank is on a machine of its own.
        load: Directory or address of the checkpoint.
        save: Directory to save into.
        layout: Layout of the run.
        endpoint: Address of the server.
        launcher: Rank on whose machine the launcher is.

    Returns:
        Sizes of the files that this rank's machine has fetched.
    """
    from neox.checkpoint.remote.fetching import with_local_load
    from neox.engine import initialize_distributed, open_engine, save_checkpoint

    os.environ.update({**KEYS, "AWS_ENDPOINT_URL": endpoint})
    rank = dist.get_rank()
    os.chdir(machines[rank])
    socket.gethostname = lambda: f"machine{rank}"
    world = dist.get_world_size()
    if load == RUN:
        if rank == launcher:
            config = tiny_plan(world, load=RUN, checkpoint_cache_dir="cache", **MODEL, **layout).config
            with_local_load(config, trains=True)
        dist.barrier()
        load = "cache/s3/bucket/run"
    plan = tiny_plan(world, load=load, checkpoint_cache_dir="cache", **MODEL, **layout)
    grid, device = initialize_distributed(plan)
    engine = open_engine(plan, grid, device)
    engine.train_batch(batches(plan, grid.dp_rank, 3 * plan.batch.gradient_accumulation_steps))
    save_checkpoint(engine, save)
    if load.startswith("cache"):
        return fetched_names(Path(load))
    return {}


def fetched_names(mirror: Path) -> dict[str, int]:
    """Sizes of the files of a copy that were fetched."""
    copy = find_checkpoint(mirror)
    manifest = read_manifest(copy)
    assert manifest is not None
    return {name: record.size for name, record in manifest.files.items() if not is_unfetched(copy / name)}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("saved", "loaded", "share", "launcher"),
    [
        ({"zero": 1}, {"zero": 1}, 0.65, 1),  # all weights, a quarter of the bytes, and half of the optimizer's states
        ({"zero": 3}, {"zero": 3}, 0.65, 0),
        ({"pp": 2, "zero": 1}, {"pp": 2, "zero": 1}, 0.6, 1),
        ({"mp": 2, "zero": 1}, {"pp": 2, "zero": 1}, 0.9, 0),  # half of the weights, and both tensor ranks' states
    ],
)
def test_each_machine_fetches_what_its_ranks_read(
    s3: FailingApp, tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any], share: float, launcher: int
) -> None:
    run_ranks(2, train, tmp_path / "save", 3, saved)
    path = find_checkpoint(tmp_path / "save")
    Mirror(RUN).upload(path)
    s3.fail = lambda number, method, path: error("503 Slow Down", "SlowDown") if number % 5 == 0 else None
    machines = [tmp_path / "one", tmp_path / "two"]
    for machine in machines:
        machine.mkdir()
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    run_ranks(2, go_on, machines, str(tmp_path / "save"), tmp_path / "local", loaded, endpoint)
    requests = len(s3.requests)
    fetched = run_ranks(2, go_on, machines, RUN, tmp_path / "remote", loaded, endpoint, launcher)
    readers = [open_checkpoint(find_checkpoint(tmp_path / name)) for name in ("local", "remote")]
    assert list(compare_checkpoints(*readers)) == []
    whole = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    for machine in fetched:
        assert sum(machine.values()) < share * whole
    states = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    transfers = sum(path.endswith(f"/{states}") for method, path in s3.requests[requests:] if method == "GET")
    holders = sum(states in machine for machine in fetched)
    assert holders <= transfers <= 2 * holders  # one file is one request, which may be refused once
