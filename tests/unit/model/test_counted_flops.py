"""The plan's operations of a network are those that torch counts in its passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from neox.architecture import training_flops_per_token
from neox.architecture.flops import forward_flops_per_token
from neox.model import GPT
from neox.parallel import ParallelGrid
from tests.plans import small_plan

LATENT = {
    "norm": "rmsnorm",
    "attention_config": ["latent", "latent"],
    "kv_lora_rank": 12,
    "head_dim": 10,
    "rotary_pct": 0.4,
    "v_head_dim": 6,
    "use_bias_in_qkv": False,
}
SAMPLES = 2


@pytest.mark.parametrize(
    "keys",
    [{"attention_config": ["global", "global"]}, LATENT, {**LATENT, "q_lora_rank": 14}],
    ids=["global", "latent", "latent queries"],
)
def test_operations_are_those_that_torch_counts(keys: dict[str, Any]) -> None:
    plan = small_plan(**keys)
    length = plan.config.model.seq_length
    assert length is not None
    model = GPT(plan, ParallelGrid.single())
    tokens = torch.randint(0, 90, (SAMPLES, length), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens)
    with FlopCounterMode(display=False) as backward:
        logits.float().square().mean().backward()
    of_tokens = SAMPLES * length
    assert forward.get_total_flops() == of_tokens * sum(forward_flops_per_token(plan.layers, length))
    both = forward.get_total_flops() + backward.get_total_flops()
    assert both == of_tokens * training_flops_per_token(plan.layers, length)
