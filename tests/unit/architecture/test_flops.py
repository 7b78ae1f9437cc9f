"""Operations per token follow from the layers."""

from __future__ import annotations

from neox.architecture import recomputed_flops_per_token, training_flops_per_token
from neox.plan.report.run_totals import run_totals
from tests.plans import small_plan


def test_six_per_parameter_and_attention():
    p = small_plan()
    hidden, layers, length = 32, 2, 16
    matrices = layers * 12 * hidden**2
    head = p.padded_vocab_size * hidden
    attention = layers * 12 * length * hidden  # scores and their use, forward and backward
    assert training_flops_per_token(p.layers, length) == 6 * (matrices + head) + attention
    assert run_totals(p).flops_per_token == 6 * (matrices + head) + attention
    last = layers * 4 * hidden**2  # torch does not repeat what ends a block
    again = {"full": 2 * (matrices - last) + attention // 3, "full_attn": layers * 6 * hidden**2 + attention // 3}
    for part, expected in {**again, "core_attn": attention // 3, "none": 0}.items():
        assert recomputed_flops_per_token(p.layers, length, [part] * layers) == expected
    assert recomputed_flops_per_token(p.layers, length, ["none", "full"]) == again["full"] // 2


def test_latent():
    keys = {"attention_config": ["latent", "latent"], "kv_lora_rank": 12, "q_lora_rank": 10, "v_head_dim": 6}
    p = small_plan(**keys, head_dim=10, rotary_pct=0.4, use_bias_in_qkv=False)
    hidden, length, heads = 32, 16, 4
    projections = 10 * hidden + heads * 10 * 10 + (12 + 4) * hidden + heads * (6 + 6) * 12
    block = projections + heads * 6 * hidden + 8 * hidden**2
    head = p.padded_vocab_size * hidden
    scores = 2 * heads * (10 + 6) * length
    assert training_flops_per_token(p.layers, length) == 6 * (2 * block + head) + 3 * 2 * scores
    assert recomputed_flops_per_token(p.layers, length, ["full_attn", "none"]) == 2 * projections + scores


def test_grouped_gated_and_windowed():
    keys = {"num_kv_heads": 2, "head_dim": 12, "activation": "swiglu", "mlp_width": 20, "qk_norm": "head"}
    p = small_plan(**keys, attention_config=["sliding_window", "global"], sliding_window_width=5)
    hidden, length, queries = 32, 16, 4 * 12
    block = hidden * (queries + 2 * 24) + queries * hidden + 3 * 20 * hidden
    head = p.padded_vocab_size * hidden
    attention = 12 * queries * (5 + length)
    assert training_flops_per_token(p.layers, length) == 6 * (2 * block + head) + attention
