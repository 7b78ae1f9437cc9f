"""Building a network under ZeRO 3 and loading it: a rank needs memory for its share and a few layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import tiny_plan

LAYERS = 16
SIZES = {"num_layers": LAYERS, "hidden_size": 512, "padded_vocab_size": 64}


def resident(field: str) -> int:
    """Return a figure of this process's memory (VmRSS, VmHWM) in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(field)


def memory_of_a_start(saving: RunPlan, loading: RunPlan) -> dict[str, tuple[int, int]]:
    """For building and for loading: (peak bytes, bytes afterwards) of this rank above those before."""
    from neox.engine import initialize_distributed, initialize_engine, save_checkpoint
    from neox.engine.build_engine import build_model
    from neox.engine.weights import read_weights
    from neox.objectives import build_objective

    grid, device = initialize_distributed(saving)
    path = save_checkpoint(initialize_engine(saving, grid, device), saving.config.checkpoint.save)
    grown = {}

    def measured(name: str, before: int) -> None:
        grown[name] = (resident("VmHWM") - before, resident("VmRSS") - before)

    objective, before = build_objective(loading), resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    model = build_model(loading, grid, objective, device)
    measured("building", before)
    Path("/proc/self/clear_refs").write_text("5")
    read_weights(model, loading.layers, grid, path)
    measured("loading", before)
    return grown


@pytest.mark.slow
def test_peak_is_the_share_and_few_layers(tmp_path):
    save, zero = str(tmp_path), {"zero": 3, "no_save_optim": True}
    saving, loading = tiny_plan(2, **SIZES, **zero, save=save), tiny_plan(2, **SIZES, **zero)
    network = 4 * loading.layers.numel
    layer = max(4 * sum(p.numel for p in each.parameters) for each in loading.layers)
    assert layer * LAYERS < 1.1 * network
    for rank in run_ranks(2, memory_of_a_start, saving, loading, timeout=300):
        for name, (peak, after) in rank.items():
            assert peak < network / 2 + 4 * layer, (name, peak / layer)
            assert after < network / 2 + 3 * layer, (name, after / layer)
