"""Which layers multiply in fp8, and on which GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from neox.engine.build_engine import multiply_in_fp8
from neox.errors import LaunchError
from neox.model import GPT
from neox.ops import FP8_RECIPES
from neox.parallel import ColumnParallelLinear, ParallelGrid, RowParallelLinear
from tests.plans import MIXTURES, NETWORKS, small_plan

FP8 = {"precision": "bf16", "fp8": "tensorwise"}


def test_a_rank_on_an_old_gpu_ends_with_its_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old GPU")
    with pytest.raises(LaunchError) as refused:
        multiply_in_fp8(torch.nn.Linear(1, 1), small_plan(**FP8), torch.device("cuda"))
    assert "an old GPU" in str(refused.value)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in MIXTURES])
def test_the_checked_matrices_are_those_that_multiply_in_fp8(name: str):
    plan = small_plan(precision="bf16", **NETWORKS[name])
    asked = plan.config.updated({"fp8": "rowwise"})
    model = GPT(plan, ParallelGrid.single())
    multiply = FP8_RECIPES["rowwise"].linear
    multiply_in_fp8(model, replace(plan, config=asked), torch.device("cpu"))
    changed = {
        f"{number}.{path}.weight"
        for number, layer in enumerate(model.sequential)
        for path, module in layer.named_modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.multiply == multiply
    }
    checked = {
        f"{layer.index}.{spec.name}"
        for layer in plan.layers
        for spec in replace(plan.layers, layers=(layer,)).divided_linears
    }
    assert changed == checked
    without_mlp = name.count("mlp") + (name in ("mamba", "mamba2"))
    assert len(changed) >= 4 * plan.architecture.num_layers - 2 * without_mlp
