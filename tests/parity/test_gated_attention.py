"""Qwen3-Next's attention with a gate of its output, and its norm from zero: outputs and gradients of transformers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextAttention,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
)

from neox.convert.layouts import from_hf_layout, to_hf_layout
from neox.families import TensorSource
from neox.model import BlockContext
from neox.model.attention import SelfAttention
from neox.ops import NORMS
from neox.parallel import ParallelGrid
from tests.plans import small_plan
from tests.transformers_versions import of_the_locked_version

FUSED = TensorSource(("q_proj", "k_proj", "v_proj"), layout="gated_heads")


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw heads, their widths and the part of them that is rotated, by the names of transformers."""
    kv_heads = draw(st.integers(1, 3))
    width = 4 * draw(st.integers(1, 5))
    return {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "head_dim": width,
        "partial_rotary_factor": draw(st.sampled_from([0.5, 1.0])),
    }


@of_the_locked_version
@given(shape=shapes(), seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_attention_with_a_gate_is_that_of_transformers(shape: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": shape["partial_rotary_factor"]}
    config = Qwen3NextConfig(hidden_size=36, rope_parameters=rope, rms_norm_eps=1e-6, **shape)
    config._attn_implementation = "eager"
    theirs = Qwen3NextAttention(config, layer_idx=0)
    network = small_plan(
        hidden_size=36,
        num_attention_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        rotary_pct=shape["partial_rotary_factor"],
        norm="rmsnorm_1p",
        rms_norm_epsilon=1e-6,
        qk_norm="head",
        use_bias_in_attn_linear=False,
        attention_output_gate=True,
    ).architecture
    ours = SelfAttention(network, 0, ParallelGrid.single(), impl="eager")
    weights = [theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight]
    with torch.no_grad():
        for norm in (theirs.q_norm, theirs.k_norm):
            norm.weight.normal_(std=0.3)
        ours.query_key_value.weight.copy_(from_hf_layout(weights, FUSED, network))
        ours.dense.weight.copy_(theirs.o_proj.weight)
        ours.q_norm.scale.copy_(theirs.q_norm.weight)
        ours.k_norm.scale.copy_(theirs.k_norm.weight)

    x = torch.randn(2, 9, 36, requires_grad=True)
    positions = torch.arange(9)
    causal = torch.full((9, 9), -torch.inf).triu(1)
    expected, _ = theirs(x, Qwen3NextRotaryEmbedding(config)(x, positions[None]), causal)
    found = ours(x, BlockContext(positions, ours.position_tables(positions, 9, x.dtype)))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), [x, theirs.q_proj.weight, theirs.v_proj.weight])
    gradient, of_rows = torch.autograd.grad((found * weight).sum(), [x, ours.query_key_value.weight])
    of_queries, _, of_values = to_hf_layout(of_rows, FUSED, network)
    torch.testing.assert_close((gradient, of_queries, of_values), wanted, atol=1e-5, rtol=1e-4)


@given(rows=st.integers(1, 3), width=st.integers(1, 6), kv_heads=st.integers(1, 3), groups=st.integers(1, 3))
@settings(max_examples=20)
def test_rows_of_gated_heads_come_back(rows: int, width: int, kv_heads: int, groups: int) -> None:
    network = small_plan(
        num_attention_heads=kv_heads * groups,
        num_kv_heads=kv_heads,
        head_dim=2 * width,
        rotary_pct=1.0,
        attention_output_gate=True,
    ).architecture
    heads = 2 * width * kv_heads
    ours: Tensor = torch.arange(float((2 * groups + 2) * heads * rows)).reshape(-1, rows)
    parts = to_hf_layout(ours, FUSED, network)
    assert [part.shape[0] for part in parts] == [2 * groups * heads, heads, heads]
    assert torch.equal(from_hf_layout(parts, FUSED, network), ours)


def test_the_norm_from_zero_is_that_of_transformers() -> None:
    theirs = Qwen3NextRMSNorm(20, eps=1e-6)
    ours = NORMS["rmsnorm_1p"](20, eps=1e-6)
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs.weight.copy_(torch.linspace(-1, 1, 20))
        ours.scale.copy_(theirs.weight)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-6, rtol=1e-6)
