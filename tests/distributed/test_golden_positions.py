"""From gpt-neox v2.0's initial weights, networks with its other positions and norms give its losses."""

import json
import shutil

import numpy as np
import pytest

from neox.config import NeoXConfig
from neox.plan import resolve
from tests.distributed.spawn import run_ranks
from tests.distributed.test_golden_curves import GOLDEN, golden_plan, train_and_compute_logits

# Ranks, keys beside the recorded configuration, and the bound of each iteration's loss from the given one on.
RUNS = {
    "v2_learned_rmsnorm_tied_pp1": (1, {"norm": "rmsnorm_v2.0"}, {1: 2e-6}),
    "v2_sinusoidal_geglu_mp2": (2, {}, {1: 2e-6}),
    # gpt-neox trains a bias of a row-parallel layer on each tensor rank, so that it learns twice as fast.
    "v2_alibi_relu_pp2_mp2": (4, {}, {1: 2e-6, 3: 5e-4}),
    # gpt-neox's stages train a table each; its first learning rate is 0.
    "v2_rpe_swish_scalenorm_pp2": (2, {}, {1: 2e-6, 3: 1e-4}),
}


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in RUNS)])
def test_losses(name, tmp_path):
    shutil.copytree(GOLDEN / "data", tmp_path / "data")
    recorded = json.loads((GOLDEN / "loss_curves.json").read_text())[name]
    world, keys, bounds = RUNS[name]
    recorded_plan = golden_plan(name, tmp_path)
    plan = resolve(NeoXConfig.from_flat({**recorded_plan.config.to_flat(), **keys}), world, recorded_plan.vocab_size)
    run_ranks(world, train_and_compute_logits, plan, np.zeros((1, 2), dtype=np.int64))
    lines = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["iteration"]: line["train/lm_loss"] for line in lines if "train/lm_loss" in line}
    bound = 0.0
    for iteration in range(1, 31):
        bound = bounds.get(iteration, bound)
        assert losses[iteration] == pytest.approx(recorded["iters"][str(iteration)]["lm_loss"], rel=bound), iteration
