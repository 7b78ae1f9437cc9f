"""Every network goes on at other degrees from its checkpoints."""

from __future__ import annotations

import pytest

from tests.distributed.spawn import run_ranks
from tests.distributed.test_reshard import plan_of, relay_and_still, worst
from tests.plans import NETWORKS, networks_for

# Of two and of four ranks; each is what was saved and what loads.
LAYOUTS = {
    2: [{"pp": 2, "mp": 1, "zero": 1}, {"pp": 1, "mp": 2, "zero": 0}, {"pp": 1, "mp": 1, "zero": 3}],
    4: [{"pp": 2, "mp": 2, "zero": 0}, {"pp": 2, "mp": 1, "zero": 1}, {"pp": 1, "mp": 4, "zero": 0}],
}
# One that shares a parameter over blocks and stages.
FAST = (2, "rpe")
ALL = [(world, name) for world in LAYOUTS for name in networks_for(world) if name != "soft_prompt"]


@pytest.mark.parametrize(
    ("world", "name"), [FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in ALL if each != FAST)]
)
def test_a_relay_of_layouts_is_an_undisturbed_run(tmp_path, world, name):
    save, keys = str(tmp_path / "relay"), {"num_layers": 2, **NETWORKS[name]}
    relayed = [plan_of(world, layout, save=save, load=save, **keys) for layout in (*LAYOUTS[world], LAYOUTS[world][0])]
    still = plan_of(world, {"pp": 1, "mp": 1, "zero": 1}, save=str(tmp_path / "still"), **keys)
    got, expected = run_ranks(world, relay_and_still, relayed, still, timeout=300)[0]
    assert worst([loss for loss, _ in got], [loss for loss, _ in expected]) < 1e-6
