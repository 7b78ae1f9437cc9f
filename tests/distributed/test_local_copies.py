"""Checkpoints that each machine has a copy of: every machine checks its own, and a shared one is read once."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import torch.distributed as dist

from neox.checkpoint import commit, find_checkpoint, layer_file, stage_directory
from neox.errors import CheckpointError
from tests.distributed.spawn import run_ranks
from tests.unit.checkpoint.synthetic import seeded_weights, small_plan, write_checkpoint


def check(directories):
    """Look at `checkpoint` from each rank's own directory, as a machine of its own; what each rank says."""
    from neox.engine.checkpoints import run_start

    rank = dist.get_rank()
    socket.gethostname = lambda: f"machine{rank}"
    read = []
    why, run_start.why_incomplete = run_start.why_incomplete, lambda *a, **k: read.append(a) or why(*a, **k)
    answers = []
    for pair in directories:
        os.chdir(pair[rank])
        read.clear()
        try:
            run_start.check_copies(Path("checkpoint"), hashes=True)
            answers.append(len(read))
        except CheckpointError as error:
            answers.append(str(error))
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, answers)
    return every


def test_every_machine_checks_its_own_copy(tmp_path):
    layers = small_plan(num_layers=1)
    staged = stage_directory(tmp_path / "save", 10)
    write_checkpoint(staged, layers, seeded_weights(layers), client_state={"iteration": 10})
    commit(staged)
    saved = find_checkpoint(tmp_path / "save")
    for name in ("one", "two", "damaged"):
        shutil.copytree(saved, tmp_path / name / "checkpoint")
    (tmp_path / "empty").mkdir()
    file = tmp_path / "damaged" / "checkpoint" / layer_file(0, 0)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    pairs = [("one", "one"), ("one", "two"), ("one", "damaged"), ("one", "empty")]
    first, second = run_ranks(2, check, [[tmp_path / name for name in pair] for pair in pairs])[0]
    assert (first[0], second[0]) == (1, 0)
    assert (first[1], second[1]) == (1, 1)
    assert first[2] == second[2]
    for part in ("machine1", "layer_00-model_00-model_states.pt"):
        assert part in first[2]
    assert first[3] == second[3]
    assert "machine1" in first[3]
