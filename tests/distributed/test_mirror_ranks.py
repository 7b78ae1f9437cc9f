"""Ranks of a run whose mirror answers nothing, or refuses everything: none waits for rank 0's upload."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from neox.checkpoint import checkpoint_directories
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan
from tests.unit.corpus.s3_server import KEYS, FailingApp, error, s3_server


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingApp]:
    with s3_server(monkeypatch) as app:
        yield app


def train(save: Path, endpoint: str) -> int:
    """Train and save twice with a mirror, as the loop does; return the steps that all ranks have finished."""
    from neox.engine import SaveReport, TrainState, initialize_distributed, initialize_engine, save_checkpoint
    from neox.features.mirror_uploads import run as mirror_uploads

    os.environ.update({**KEYS, "AWS_ENDPOINT_URL": endpoint})
    mirror_uploads._DEADLINE_SECONDS = 1.0
    plan = tiny_plan(dist.get_world_size(), save=str(save), checkpoint_mirror="s3://bucket/run")
    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    uploads = None
    if grid.rank == 0:
        uploads = mirror_uploads.MirrorUploads(plan)
        uploads.on_start(TrainState())
    data = batches(plan, grid.dp_rank)
    for _ in range(2):
        engine.train_batch(data)
        path = save_checkpoint(engine, save)
        if uploads is not None:
            uploads.on_save(TrainState(), SaveReport(path, engine.iteration, 0.0, 0.0))
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, engine.iteration)
    if uploads is not None:
        uploads.on_exit()
    return min(steps)


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, True])
def test_no_rank_waits_for_an_upload(s3: FailingApp, tmp_path: Path, answers: bool) -> None:
    finished = threading.Event()

    def fail(number: int, method: str, path: str) -> tuple[str, bytes]:
        if not answers:
            finished.wait(300)
        return error("403 Forbidden", "ExpiredToken")

    s3.fail = fail
    assert run_ranks(2, train, tmp_path, os.environ["AWS_ENDPOINT_URL"], timeout=280) == [2, 2]
    finished.set()
    assert s3.requests
    assert len(checkpoint_directories(tmp_path)) == 2
