"""The plan of a small model on one rank, for what stands around training."""

from __future__ import annotations

from typing import Any

from neox.config import NeoXConfig, RunPlan, resolve


def idle_plan(**keys: Any) -> RunPlan:
    """Resolve a small model with further keys, for one rank."""
    flat = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "pos_emb": "rotary",
        "train_micro_batch_size_per_gpu": 3,
        **keys,
    }
    return resolve(NeoXConfig.from_flat(flat), 1, 100)
