"""Parameter counts and bytes of weights and optimizer states against models and engines that were really built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch.utils._pytree import tree_leaves

from neox.config import NeoXConfig
from neox.plan import resolve
from neox.plan.devices.device import rank_memory
from neox.plan.memory import stage_memory
from neox.plan.memory.activations import block_bytes
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

# One layout for each wrapper that DeepSpeed has for a precision and a ZeRO stage.
LAYOUTS = {
    "fp32, ZeRO 1": {"zero": 1},
    "fp16, ZeRO 0": {"precision": "fp16"},
    "fp16, ZeRO 1": {"precision": "fp16", "zero": 1},
    "bf16, ZeRO 0": {"precision": "bf16"},
    "bf16, ZeRO 1": {"precision": "bf16", "zero": 1},
    "bf16, ZeRO 3": {"precision": "bf16", "zero": 3},
    "bf16, two stages": {"precision": "bf16", "pp": 2},
}


def built_bytes(plans, save):
    """For each plan: bytes of weights, of states with fp32 copies, and of a background save's copies, after a step."""
    return [_built_bytes(plan, save / str(number)) for number, plan in enumerate(plans)]


def _built_bytes(plan, save):
    from neox.engine import initialize_distributed, initialize_engine
    from neox.engine.checkpoints.background_saves import QueuedFiles
    from neox.engine.checkpoints.saving import stage_checkpoint
    from neox.features.table import build_features

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device, build_features)
    engine.train_batch(batches(plan, grid.dp_rank))
    parameters = list(engine.deepspeed_engine.module.parameters())
    weights = sum(getattr(p, "ds_tensor", p).numel() * p.element_size() for p in parameters)
    own = {id(p) for p in parameters}
    moved = [*engine.optimizer.state, *(p for group in engine.optimizer.param_groups for p in group["params"])]
    copies = {id(p): p for p in moved if id(p) not in own}.values()
    states = [
        t for state in engine.optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.numel() > 1
    ]
    writer = QueuedFiles()
    stage_checkpoint(engine, save, writer)
    return weights, sum(t.numel() * t.element_size() for t in (*copies, *states)), _copied(writer)


def _copied(writer):
    """Return the bytes of the copies of tensors that a writer has queued; random states are left out."""
    tensors = [t for _, value in writer._queue for t in tree_leaves(value) if torch.is_tensor(t)]
    return sum(t.untyped_storage().nbytes() for t in tensors if t.is_floating_point())


@pytest.mark.parametrize("half", [False, True], ids=["fp32 and bf16", "fp16"])
def test_states_are_what_engines_hold(half, tmp_path):
    if half and not get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed trains in fp16 on no device of this machine")
    saving = {"save": str(tmp_path), "async_save": True}
    chosen = {name: keys for name, keys in LAYOUTS.items() if (keys.get("precision") == "fp16") == half}
    plans = {name: tiny_plan(2, **saving, **keys) for name, keys in chosen.items()}
    for rank, measured in enumerate(run_ranks(2, built_bytes, list(plans.values()), tmp_path, timeout=300)):
        for (name, plan), (weights, optimizer, copies) in zip(plans.items(), measured, strict=True):
            expected = rank_memory(plan, rank, on_cpu=False)
            # Flat buffers are padded to whole cache lines per rank, which shows at this size.
            assert weights == pytest.approx(expected.weights, rel=0.02), name
            assert optimizer == pytest.approx(expected.optimizer, rel=0.02), name
            assert copies == pytest.approx(expected.copies, rel=0.02), (name, rank)


def test_activations_are_what_autograd_keeps():
    """The bytes of a block's saved tensors on CPU, each storage once, against the formula."""
    from neox.model import build_layer
    from neox.model.context import BlockContext
    from neox.parallel import ParallelGrid

    positions = torch.arange(256)
    parallel, learned = {"gpt_j_residual": True}, {"pos_emb": "learned"}
    others = ({**learned, "norm": "scalenorm"}, {**parallel, "norm": "rmsnorm_v2.0"})
    masked: tuple[dict[str, Any], ...] = (
        {"sliding_window_width": 64},
        {"reset_attention_mask": True},
        {"attention_config": ["bigbird", "bigbird"]},
        {"attention_config": ["flash", "flash"], "sliding_window_width": 64, "pos_emb": "alibi"},
    )
    tiles = {"mlp_tile_size": 32}
    tiled = (tiles, {**tiles, **parallel}, {**tiles, **others[0]}, {**tiles, "norm_placement": "both"})
    gated = {"attention_output_gate": True}
    rms = {"norm": "rmsnorm"}
    by_steps = (rms, {"norm": "rmsnorm_1p", **parallel}, {**rms, **tiles}, {**rms, "qk_norm": "head"})
    by_steps += ({**rms, "norm_placement": "both"}, {**rms, "norm_placement": "both", **tiles})
    plain = ({}, parallel, {"pos_emb": "none"}, {**parallel, "hidden_size": 128}, learned, gated)
    for keys in (*plain, *others, *by_steps, *masked, *tiled):
        flat = {"hidden_size": 64, "num_attention_heads": 4, "seq_length": 256, "pos_emb": "rotary"}
        flat |= {"num_layers": 2, "train_micro_batch_size_per_gpu": 2, "attention_config": [[["flash"], 2]]}
        flat |= {"attention_dropout": 0, "hidden_dropout": 0, "rotary_pct": 0.25, **keys}
        plan = resolve(NeoXConfig.from_flat(flat), 1, 100)
        layer = build_layer(plan, 2, ParallelGrid.single(), device="cpu", dtype=torch.bfloat16)
        weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = torch.randn(2, 256, plan.layers.architecture.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            tables = layer.attention.position_tables(positions, 256, x.dtype)
            starts = torch.zeros(2, 256, dtype=torch.long) if plan.config.data.reset_attention_mask else None
            layer(x, BlockContext(positions, tables, starts))
        measured = sum(size for pointer, size in kept.items() if pointer not in weights)
        run = replace(plan.workload, precision="bf16", family="cpu")
        assert block_bytes(run) == pytest.approx(measured, rel=0.1), keys


@pytest.mark.parametrize("mp", [1, 2, 4])
@pytest.mark.parametrize(
    "keys", [{}, {"no_weight_tying": True}, {"no_weight_tying": True, "output_layer_parallelism": "column"}]
)
def test_parameter_counts_are_the_built_models(mp, keys):
    from neox.model import GPT
    from neox.parallel import ParallelGrid

    plan = tiny_plan(1, **keys)
    model = GPT(plan, ParallelGrid.single(), device="meta")
    assert sum(p.numel() for p in model.parameters()) == plan.layers.numel
    shards = tiny_plan(mp, mp=mp, **keys)
    names = {(layer.index, p.name): p for layer in plan.layers for p in layer.parameters}
    split = sum(p.numel for p in names.values() if p.partition_dim is not None)
    whole = plan.layers.numel - split
    held = stage_memory(shards.workload, shards.stages[0]).weights // 4
    assert held == split // mp + whole
