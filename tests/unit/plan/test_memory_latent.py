"""The plan counts what autograd keeps of latent attention on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from neox.architecture import BLOCK_OFFSET
from neox.architecture.attention import LATENT_ATTENTION
from neox.config import NeoXConfig
from neox.model import BlockContext, build_layer
from neox.ops import DTYPES
from neox.parallel import ParallelGrid
from neox.plan import resolve
from neox.plan.memory.attention import attention_memory

LATENT = {
    "num_layers": 1,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 96,
    "v_head_dim": 64,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "rotary_pct": 1 / 3,
    "pos_emb": "rotary",
    "norm": "rmsnorm",
    "use_bias_in_attn_linear": False,
    "attention_config": [[["latent"], 1]],
    "attention_dropout": 0.0,
    "train_micro_batch_size_per_gpu": 1,
    "train_iters": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
}
SHAPES = {
    "blocks of queries": {"seq_length": 512},
    "all scores": {"seq_length": 1024},
    "values as wide as keys": {"seq_length": 1024, "v_head_dim": 96},
    "many small heads": {"seq_length": 640, "num_attention_heads": 16, "head_dim": 24, "v_head_dim": 16},
    "wide values": {"seq_length": 128, "v_head_dim": 128, "kv_lora_rank": 128},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_autograd_keeps_is_planned(shape: str, precision: str) -> None:
    keys = {**LATENT, **SHAPES[shape]}
    keys["max_position_embeddings"] = keys["seq_length"]
    plan = resolve(NeoXConfig.from_flat({**keys, "precision": precision}), 1, 64)
    dtype = DTYPES[precision]
    grid = ParallelGrid.single()
    attention = build_layer(plan, BLOCK_OFFSET, grid, device=torch.device("cpu"), dtype=dtype).attention
    weights = {parameter.untyped_storage().data_ptr() for parameter in attention.parameters()}
    positions = torch.arange(keys["seq_length"])
    tables = attention.position_tables(positions, keys["seq_length"], dtype)
    shared = {table.untyped_storage().data_ptr() for pair in tables.values() for table in pair}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.zeros(1, keys["seq_length"], 256, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(x, BlockContext(positions, tables))
    there = {x.untyped_storage().data_ptr()} | weights | shared
    found = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in there)
    number = x.element_size()
    output = keys["seq_length"] * keys["num_attention_heads"] * keys["v_head_dim"] * number
    planned = sum(attention_memory(plan.workload_on("cpu"), LATENT_ATTENTION))
    assert planned == pytest.approx(found - output, rel=0.02)
