"""A small configuration that resolves, to be bent by each test."""

from __future__ import annotations

import pytest


@pytest.fixture
def tiny() -> dict:
    return {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "pos_emb": "rotary",
        "rotary_pct": 0.25,
        "train_iters": 10,
        "train_micro_batch_size_per_gpu": 2,
    }
