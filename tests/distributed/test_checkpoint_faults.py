"""A small version of benchmarks/checkpoint_faults.py: kills, flipped bits and full disks."""

from __future__ import annotations

import random

import pytest

from benchmarks.checkpoint_faults import OFFLOADS, fill_disk, flip_bits, kill_often


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
