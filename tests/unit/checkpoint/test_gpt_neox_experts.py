"""Experts in gpt-neox's layer files: whole experts on tensor ranks, as rows of single matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neox.checkpoint import OptimizerReader, open_checkpoint, save_file, write_layer
from neox.config import NeoXConfig
from neox.convert.verification import load_reference_model, single_rank_plan
from neox.errors import CheckpointError
from neox.model import BlockContext, ExpertMLP
from tests.errors import raises_naming
from tests.plans import SMALL
from tests.unit.checkpoint.synthetic import seeded_weights, write_checkpoint

EXPERTS, HIDDEN, WIDTH = 4, 32, 256  # 4 x hidden, rounded up to a multiple of 256
KEYS: dict[str, Any] = {
    **SMALL,
    "moe_num_experts": EXPERTS,
    "moe_top_k": 2,
    "moe_expert_interval": 2,
    "moe_ffn_hidden_size": WIDTH,
}
GATED: dict[str, Any] = {**KEYS, "activation": "swiglu", "mlp_width": 64}


def matrices(names: tuple[str, ...], tp_size: int) -> list[dict[str, Tensor]]:
    """Return the experts' matrices of each tensor rank as gpt-neox keeps them, and its routers."""
    generator = torch.Generator().manual_seed(5)
    ranks = []
    for rank in range(tp_size):
        state = {}
        for name in names:
            rows = EXPERTS // tp_size * WIDTH
            state[f"mlp.experts.mlp.{name}"] = torch.randn(rows, HIDDEN, generator=generator) * 0.1
        router = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(rank))
        state["mlp.router.layer.weight"] = router  # rank 0's is trained, the others decay
        ranks.append(state)
    return ranks


def gpt_neox_checkpoint(directory: Path, keys: dict[str, Any], tp_size: int) -> tuple[Path, list[dict[str, Tensor]]]:
    """Write a checkpoint whose first block has experts in gpt-neox's form."""
    layers = single_rank_plan(NeoXConfig.from_flat(keys), 96).layers
    path = write_checkpoint(directory / "global_step3", layers, seeded_weights(layers), tp_size=tp_size)
    names = ("w1", "w2", "w3") if keys is GATED else ("w1", "w2")
    ranks = matrices(names, tp_size)
    for rank, experts in enumerate(ranks):
        file = path / f"layer_02-model_{rank:02d}-model_states.pt"
        stored = torch.load(file)
        kept = {name: tensor for name, tensor in stored.items() if not name.startswith("mlp.")}
        write_layer(path, 2, rank, {**kept, **experts})
    return path, ranks


def gpt_neox_mixture(ranks: list[dict[str, Tensor]], x: Tensor, gated: bool) -> Tensor:
    """Compute a mixture as megatron/model/moe.py does in an evaluation: router of rank 0, experts of all ranks."""
    probabilities = F.linear(x, ranks[0]["mlp.router.layer.weight"]).softmax(-1)
    weights, experts = probabilities.topk(2, dim=-1)
    here = EXPERTS // len(ranks)
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        state = ranks[expert // here]
        w1, w2 = (state[f"mlp.experts.mlp.{name}"].view(here, -1, HIDDEN)[expert % here] for name in ("w1", "w2"))
        inner = x @ w1.t()
        if gated:
            w3 = state["mlp.experts.mlp.w3"].view(here, -1, HIDDEN)[expert % here]
            inner = F.silu(inner) * (x @ w3.t())
        else:
            inner = F.gelu(inner)
        weight = (weights * (experts == expert)).sum(-1, keepdim=True)
        total += weight * (inner @ w2)
    return total


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_outputs_are_those_of_gpt_neox(tmp_path: Path, tp_size: int, gated: bool):
    keys = GATED if gated else KEYS
    config = NeoXConfig.from_flat(keys)
    path, ranks = gpt_neox_checkpoint(tmp_path, keys, tp_size)
    reader = open_checkpoint(path, config=config)
    assert reader.tp_size == tp_size
    model = load_reference_model(reader, config)
    mixture = model.sequential[2].mlp
    assert isinstance(mixture, ExpertMLP)
    x = torch.randn(2, 7, HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found, _ = mixture(x, BlockContext(torch.arange(7)))
    torch.testing.assert_close(found, gpt_neox_mixture(ranks, x, gated), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_they_are_read_at_every_tensor_degree(tmp_path: Path, tp_size: int):
    path, ranks = gpt_neox_checkpoint(tmp_path, KEYS, tp_size)
    reader = open_checkpoint(path, config=NeoXConfig.from_flat(KEYS))
    w1 = torch.cat([state["mlp.experts.mlp.w1"] for state in ranks]).view(EXPERTS, WIDTH, HIDDEN)
    w2 = torch.cat([state["mlp.experts.mlp.w2"] for state in ranks]).view(EXPERTS, WIDTH, HIDDEN)
    for degree in (1, 2, 4):
        width = WIDTH // degree
        for rank in range(degree):
            own = reader.layer_shard(2, rank, degree)
            rows = slice(rank * width, (rank + 1) * width)
            assert torch.equal(own["mlp.router.weight"], ranks[0]["mlp.router.layer.weight"])
            assert torch.equal(own["mlp.experts.dense_h_to_4h.weight"], w1[:, rows])
            assert torch.equal(own["mlp.experts.dense_4h_to_h.weight"], w2[:, rows].transpose(1, 2))
    blocks = list(reader.row_blocks(2, "mlp.experts.dense_4h_to_h.weight"))
    assert torch.equal(torch.cat(blocks), w2.transpose(1, 2))


def test_another_number_of_experts_and_states_of_the_optimizer_are_refused(tmp_path: Path):
    path, _ = gpt_neox_checkpoint(tmp_path, KEYS, 1)
    reader = open_checkpoint(path, config=NeoXConfig.from_flat({**KEYS, "moe_num_experts": 8}))
    with raises_naming(CheckpointError, "mlp.router.weight", "layer_02"):
        reader.full(2, "mlp.router.weight")
    layers = open_checkpoint(path, config=NeoXConfig.from_flat(KEYS)).layers
    assert layers is not None
    inner = {"state": {}, "param_groups": []}
    client = {"optimizer": inner, "ds_config": {"zero_optimization": {"stage": 0}}, "global_steps": 3}
    save_file(path / "mp_rank_00_model_states.pt", client)
    with raises_naming(CheckpointError, "experts", "no_load_optim"):
        OptimizerReader(path, layers)
    stored = torch.load(path / "layer_02-model_00-model_states.pt")
    write_layer(path, 2, 0, {**stored, "mlp.experts.mlp.w1": torch.zeros(7, HIDDEN)})
    with raises_naming(CheckpointError, "w1", "7"):
        open_checkpoint(path, config=NeoXConfig.from_flat(KEYS)).full(2, "mlp.router.weight")
