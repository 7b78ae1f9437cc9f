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
