"""Rank arithmetic."""

from __future__ import annotations

import pytest

from neox.parallel import ParallelGrid, Topology
from tests.errors import raises_naming


def test_pipe_is_outermost_and_tensor_innermost():
    topology = Topology(pp_size=2, dp_size=3, tp_size=4)
    assert topology.world_size == 24
    assert topology.rank_of(1, 2, 3) == 23
    assert [topology.rank_of(*topology.coordinates(rank)) for rank in range(24)] == list(range(24))
    assert topology.groups("tp")[0] == [0, 1, 2, 3]
    assert topology.groups("dp")[0] == [0, 4, 8]
    assert topology.groups("pp")[0] == [0, 12]
    assert topology.groups("pp", "tp")[1] == [4, 5, 6, 7, 16, 17, 18, 19]


@pytest.mark.parametrize("axes", [("tp",), ("dp",), ("pp",), ("pp", "tp")])
def test_groups_of_an_axis_hold_every_rank_once(axes):
    ranks = [rank for group in Topology(2, 3, 4).groups(*axes) for rank in group]
    assert sorted(ranks) == list(range(24))


def test_impossible_degrees_and_ranks_are_errors():
    with raises_naming(ValueError, "pp_size=0"):
        Topology(0, 1, 1)
    with raises_naming(ValueError, 2):
        Topology(2, 1, 1).coordinates(2)


def test_single_grid_needs_no_process_group():
    grid = ParallelGrid.single()
    assert (grid.world_size, grid.pp_rank, grid.dp_rank, grid.tp_rank) == (1, 0, 0, 0)
    assert not grid.rng.enabled
