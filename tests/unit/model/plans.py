"""Small run plans for tests, from flat keys."""

from __future__ import annotations

from typing import Any

from neox.config import NeoXConfig, RunPlan, resolve


def small_plan(world_size: int = 1, vocab_size: int = 100, **keys: Any) -> RunPlan:
    """Resolve a 2-layer, 32-wide model; `keys` are flat NeoX keys on top."""
    flat = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "pos_emb": "rotary",
        "rotary_pct": 0.5,
        "no_weight_tying": True,
        "output_layer_parallelism": "column",
        "make_vocab_size_divisible_by": 32,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "train_micro_batch_size_per_gpu": 2,
        "train_iters": 10,
        "lr_decay_iters": 10,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    }
    return resolve(NeoXConfig.from_flat(flat | keys), world_size, vocab_size)
