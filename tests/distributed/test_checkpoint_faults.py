"""A small version of benchmarks/checkpoint_faults.py: kills, flipped bits and full disks."""

from __future__ import annotations

import errno
import random

import pytest

from benchmarks.checkpoint_faults import OFFLOADS, fill_disk, flip_bits, kill_often
from tests.distributed.spawn import run_ranks


def test_kills_flipped_bits_and_full_disks(tmp_path):
    generator = random.Random(0)
    killed = kill_often(tmp_path, 2, generator)
    assert (killed.kills, killed.lost, killed.corrupt, killed.same_curve) == (2, 0, 0, True)
    assert flip_bits(tmp_path, 10, generator) == 10
    assert fill_disk(tmp_path, 4)[0] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offload", "async_save"), [("optimizer", False), ("optimizer", True), ("weights", True), ("files", False)]
)
def test_kills_with_offloaded_states(tmp_path, offload, async_save):
    killed = kill_often(tmp_path, 3, random.Random(1), async_save=async_save, **OFFLOADS[offload])
    assert (killed.kills, killed.lost, killed.corrupt, killed.same_curve) == (3, 0, 0, True)
    assert killed.inside_a_save


def cause_of_a_full_disk():
    """What each rank reports to the launcher if the disk of rank 0 is full."""
    import torch.distributed as dist

    from neox.engine.distributed import all_succeeded
    from neox.errors import CheckpointError, os_errors
    from neox.train.failures import failure_report

    def write():
        if dist.get_rank() == 0:
            with os_errors(CheckpointError, "a file"):
                raise OSError(errno.ENOSPC, "No space left on device")

    try:
        all_succeeded(write, "saving")
    except CheckpointError as error:
        report = failure_report(error)
        return str(error), None if report is None else report.cause


def test_a_full_disk_is_known_as_the_cause_of_a_failed_save():
    (message, cause), (same, _) = run_ranks(2, cause_of_a_full_disk)
    assert cause == "disk full"
    assert "rank 0" in message
    assert same == message
