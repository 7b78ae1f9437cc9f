"""Every network trains alike under every layout, and goes on at other degrees from its checkpoints."""

from __future__ import annotations

import pytest

from tests.distributed.spawn import run_ranks
from tests.distributed.test_reshard import plan_of, relay_and_still, worst
from tests.distributed.training_runs import legal_layouts
from tests.plans import NETWORKS

# One that shares a parameter over blocks and stages; the others take as long each.
FAST = "rpe"


@pytest.mark.parametrize("name", [FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS if n != FAST)])
def test_every_layout_of_two_ranks_in_one_run(tmp_path, name):
    """pp, mp, dp and each ZeRO stage, each as what was saved and as what loads; and without a resume."""
    save = str(tmp_path / "relay")
    layouts = legal_layouts(2)
    relayed = [
        plan_of(2, layout, save=save, load=save, num_layers=2, **NETWORKS[name])
        for layout in layouts[::2] + layouts[1::2]
    ]
    still = plan_of(2, {"pp": 1, "mp": 1, "zero": 1}, save=str(tmp_path / "still"), num_layers=2, **NETWORKS[name])
    got, expected = run_ranks(2, relay_and_still, relayed, still, timeout=300)[0]
    assert worst([loss for loss, _ in got], [loss for loss, _ in expected]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_stages_and_tensor_ranks_together(tmp_path, name):
    save = str(tmp_path / "relay")
    layouts = [{"pp": 2, "mp": 2, "zero": 0}, {"pp": 2, "mp": 2, "zero": 1}, {"pp": 1, "mp": 4, "zero": 0}]
    relayed = [plan_of(4, layout, save=save, load=save, num_layers=2, **NETWORKS[name]) for layout in layouts]
    still = plan_of(4, {"pp": 1, "mp": 1, "zero": 1}, save=str(tmp_path / "still"), num_layers=2, **NETWORKS[name])
    got, expected = run_ranks(4, relay_and_still, relayed, still, timeout=300)[0]
    assert worst([loss for loss, _ in got], [loss for loss, _ in expected]) < 1e-6
