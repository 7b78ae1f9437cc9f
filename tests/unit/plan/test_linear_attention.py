"""Gated linear attention in the plan: what is refused by name, and the memory of its backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from neox.architecture import BLOCKS, MicroBatch
from neox.model import BlockContext
from neox.model.gated_delta import GatedDeltaMixer
from neox.parallel import ParallelGrid
from tests.plans import NETWORKS, SMALL, problem_keys, small_plan

NETWORK = {**SMALL, **NETWORKS["gated_delta"]}


@pytest.mark.parametrize(
    ("key", "world", "change"),
    [
        ("linear_num_value_heads", 1, {"linear_num_value_heads": 6}),
        ("model_parallel_size", 2, {"linear_num_key_heads": 1, "model_parallel_size": 2}),
        ("context_parallel_size", 2, {"context_parallel_size": 2}),
        ("use_mup", 1, {"use_mup": True, "mup_base_hidden_size": 16}),
        ("soft_prompt_tuning", 1, {"soft_prompt_tuning": {"enabled": True, "num_tokens": 3}}),
        ("recompute_granularity", 1, {"checkpoint_activations": True, "recompute_granularity": "core_attn"}),
        ("linear_norm_placement", 1, {"linear_norm_placement": "both", "gpt_j_residual": True}),
    ],
)
def test_what_does_not_work_is_refused_by_name(key: str, world: int, change: dict[str, Any]) -> None:
    assert problem_keys(world, **NETWORK) == []
    assert any(key in keys for keys in problem_keys(world, **{**NETWORK, **change}))


@pytest.mark.parametrize("kind", [name for name, kind in BLOCKS.items() if kind.keeps == "state"])
def test_recurrent_networks_are_checked_without_heads(kind: str) -> None:
    """A network without attention needs no `num_attention_heads`: its keys are refused, or change nothing."""
    keys = {**SMALL, "num_attention_heads": None, "rotary_pct": 1.0, "pos_emb": "none", "norm": "rmsnorm"}
    keys |= {"attention_config": [[[kind], "all"]], "mamba_head_dim": 8, "head_size": 8}
    assert problem_keys(1, 100, **keys, kv_lora_rank=8) == []
    assert ("use_mup", "attention_config") in problem_keys(1, 100, **keys, use_mup=True, mup_base_hidden_size=16)


@pytest.mark.parametrize(
    ("key", "value"), [("linear_num_key_heads", 2), ("linear_allow_neg_eigval", True), ("linear_norm_epsilon", 1e-5)]
)
def test_its_keys_change_nothing_in_other_networks(key: str, value: float) -> None:
    assert len([note for note in small_plan(**{key: value}).notes if key in note]) == 1


@pytest.mark.parametrize("separates", [False, True])
@pytest.mark.parametrize("sizes", [(2, 6, 48, 96), (4, 4, 64, 128), (3, 9, 96, 96)])
def test_the_backward_pass_takes_the_planned_memory(sizes: tuple[int, int, int, int], separates: bool) -> None:
    """The most bytes at once while everything between the projections is computed again, for shapes not fitted to."""
    key_heads, heads, key_dim, value_dim = sizes
    network = small_plan(
        attention_config=["gated_delta", "global"],
        linear_num_key_heads=key_heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
    ).architecture
    mixer = GatedDeltaMixer(network, ParallelGrid.single())
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    length = 320
    projected = torch.randn(1, length, mixer.in_proj.weight.shape[0], requires_grad=True)
    gradient = torch.randn(1, length, heads * value_dim)
    context = BlockContext(torch.arange(length))
    if separates:
        starts = torch.zeros(1, length, dtype=torch.long)
        starts[:, 100:] = 100
        context = BlockContext(torch.arange(length) - starts, document_starts=starts)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        mixer.between(projected, context).backward(gradient)
    assert profiler.profiler is not None
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = 0
    most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    batch = MicroBatch(
        length, length, token_shares=1, tp_size=1, bytes_per_number=4, separates_documents=separates, norm_bytes=0
    )
    assert BLOCKS["gated_delta"].recomputed(network, batch) == pytest.approx(most, rel=0.05)
