"""Operations per token follow from the layers."""

from __future__ import annotations

from neox.architecture import training_flops_per_token
from neox.config.report import figures
from tests.plans import small_plan


def test_six_per_parameter_and_attention():
    p = small_plan()
    hidden, layers, length = 32, 2, 16
    matrices = layers * 12 * hidden**2
    head = p.padded_vocab_size * hidden
    attention = layers * 12 * length * hidden  # scores and their use, forward and backward
    assert training_flops_per_token(p.layers, length) == 6 * (matrices + head) + attention
    assert figures(p).flops_per_token == 6 * (matrices + head) + attention
    recomputed = 8 * matrices + attention * 4 // 3 + 6 * head
    assert training_flops_per_token(p.layers, length, recompute=True) == recomputed


def test_grouped_gated_and_windowed():
    keys = {"num_kv_heads": 2, "head_dim": 12, "activation": "swiglu", "mlp_width": 20, "qk_norm": "head"}
    p = small_plan(**keys, attention_config=["sliding_window", "global"], sliding_window_width=5)
    hidden, length, queries = 32, 16, 4 * 12
    block = hidden * (queries + 2 * 24) + queries * hidden + 3 * 20 * hidden
    head = p.padded_vocab_size * hidden
    attention = 12 * queries * (5 + length)
    assert training_flops_per_token(p.layers, length) == 6 * (2 * block + head) + attention
