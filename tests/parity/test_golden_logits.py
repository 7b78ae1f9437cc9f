"""The network gives gpt-neox v2.0's logits from gpt-neox v2.0's weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from neox.architecture import LayerPlan
from neox.config import NeoXConfig
from neox.model import GPT
from neox.parallel import ParallelGrid
from neox.plan import config_from_files, resolve

GOLDEN = Path(__file__).parents[1] / "golden"
RUNS = ("v2_pp1_mp1_dp1_fp32", "v2_pp2_mp1_dp1_fp32", "v2_pp2_mp2_dp1_fp32")


def numpy_globals() -> list:
    """Return what numpy's random state needs to be unpickled, under the names that wrote it."""
    reconstruct = np.zeros(1).__reduce__()[0]
    return [
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        np.ndarray,
        np.dtype,
        type(np.dtype(np.uint32)),
    ]


def golden_weights(run: str, layers: LayerPlan, tp_size: int) -> dict[str, torch.Tensor]:
    """Return the weights after 30 iterations under the names of `GPT`, tensor ranks joined."""
    directory = GOLDEN / run / "global_step30"
    if not (directory / "layer_00-model_00-model_states.pt").exists():
        # One stage is a sequential model in v2.0; its file holds numpy random states beside the weights.
        with torch.serialization.safe_globals(numpy_globals()):
            return torch.load(directory / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    weights = {}
    for entry in layers.weight_layers:
        files = [directory / f"layer_{entry.index:02d}-model_{rank:02d}-model_states.pt" for rank in range(tp_size)]
        parts = [torch.load(file, weights_only=True) for file in files]
        split = {spec.name: spec.partition_dim for spec in entry.parameters}
        for name in parts[0]:
            tensors = [part[name] for part in parts]
            dim = split.get(name)
            weights[f"sequential.{entry.index}.{name}"] = tensors[0] if dim is None else torch.cat(tensors, dim)
    return weights


@pytest.mark.parametrize("attention", ["global", "flash"])
@pytest.mark.parametrize("run", RUNS)
def test_logits_of_golden_weights(run: str, attention: str):
    config = config_from_files([GOLDEN / run / f"{run}.yml"])
    tp_size = config.parallelism.model_parallel_size
    one_rank = {"pipe_parallel_size": 1, "model_parallel_size": 1, "global_num_gpus": 1, "num_gpus": 1}
    flat = config.to_flat() | one_rank | {"attention_config": [[[attention], "all"]]}
    plan = resolve(NeoXConfig.from_flat(flat), 1, 1000)
    model = GPT(plan, ParallelGrid.single()).eval()
    model.load_state_dict(golden_weights(run, plan.layers, tp_size), strict=True)
    golden = np.load(GOLDEN / run / "logits_step30.npz")
    with torch.no_grad():
        logits = model(torch.from_numpy(golden["tokens"]).long())
    torch.testing.assert_close(logits, torch.from_numpy(golden["logits"]), atol=1e-5, rtol=0)
