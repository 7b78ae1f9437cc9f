"""Networks on fake CUDA tensors: what makes the host wait for the device, and which kernels attention is sent to."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from neox.generation.load import runner_of_stage
from neox.model import GPT
from neox.parallel import ParallelGrid
from tests.distributed.spawn import run_ranks
from tests.fake_cuda import CUDA, fake_cuda, let_autograd_run
from tests.losses import causal_lm_loss
from tests.plans import NETWORKS, small_plan

LONGROPE = {
    "rope_scaling": {
        "rope_type": "longrope",
        "factor": 2.0,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0, 2.0],
        "long_factor": [1.0, 4.0],
    }
}
TESTED: dict[str, dict[str, Any]] = {name: NETWORKS[name] for name in ("rotary", "mistral", "gemma", "latent", "qwen2")}
TESTED["longrope"] = LONGROPE


LENGTHS = ((9,), (4, 9))
LONG_WINDOW = {**NETWORKS["mistral"], "max_position_embeddings": 64, "seq_length": 64}


def network(keys: dict[str, Any]) -> tuple[Any, GPT]:
    plan = small_plan(**{**keys, "precision": "bf16"})
    return plan, GPT(plan, ParallelGrid.single(), device=CUDA, dtype=torch.bfloat16)


def waits_of_training(keys: dict[str, Any]) -> list[str]:
    """Compute a loss and its gradients, and return what the host waited for."""
    with fake_cuda() as waits:
        _, model = network(keys)
        waits.clear()
        tokens = torch.zeros(2, 16, dtype=torch.long, device=CUDA)
        loss = causal_lm_loss(model, tokens, tokens.clone(), torch.ones(2, 16, device=CUDA))
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or parameter.grad.device == CUDA, name
        return list(waits)


def generate(keys: dict[str, Any], lengths: tuple[int, ...]) -> tuple[list[str], list[tuple]]:
    """Read a prompt and two tokens with a cache.

    Returns:
        What the host waited for, and of each call of torch's attention the shapes and whether there was a mask.
    """
    calls = []
    original = F.scaled_dot_product_attention

    def attend(q, k, v, attn_mask=None, *args, **kwargs):
        calls.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), attn_mask is not None))
        return original(q, k, v, attn_mask, *args, **kwargs)

    with fake_cuda() as waits, mock.patch.object(F, "scaled_dot_product_attention", attend):
        plan, model = network(keys)
        runner = runner_of_stage(plan, model.eval().stage, ParallelGrid.single(), CUDA)
        runner.recorded = False
        decoding = runner.begin(lengths, max(lengths) + 3)
        waits.clear()
        with torch.inference_mode():
            for length in (max(lengths), 1, 1):
                logits = decoding.feed(torch.zeros(len(lengths), length, dtype=torch.long, device=CUDA))
                assert logits.device == CUDA
        return list(waits), calls


def on_fake_cuda() -> dict[tuple, Any]:
    """Run all cases in this process."""
    let_autograd_run()
    found: dict[tuple, Any] = {}
    for name, keys in TESTED.items():
        found["training", name] = waits_of_training(keys)
        for lengths in LENGTHS:
            found["generation", name, lengths] = generate(keys, lengths)
    with mock.patch("neox.model.cache.blocked_attention", side_effect=AssertionError):
        found["window"] = generate(LONG_WINDOW, (40, 23))
    return found


@pytest.fixture(scope="module")
def found() -> dict[tuple, Any]:
    return run_ranks(1, on_fake_cuda)[0]


@pytest.mark.parametrize("name", TESTED)
def test_a_training_pass_makes_the_host_wait_for_nothing(found, name: str):
    assert not found["training", name]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", TESTED)
def test_generation_uses_no_kernel_that_holds_all_scores(found, name: str, lengths: tuple[int, ...]):
    """Of torch's kernels only flash takes shared heads, and it takes no mask and no values of another width."""
    waits, calls = found["generation", name, lengths]
    assert not waits
    assert calls or name == "gemma"  # whose scores are bounded
    for q, k, v, masked in calls:
        assert q[1] == k[1] or (not masked and q[-1] == v[-1]), (q, k, v)


def test_a_window_reads_a_prompt_by_few_large_chunks(found):
    """Blocks that suit a CPU would be a loop over heads and 64 queries each."""
    waits, calls = found["window"]
    assert not waits
    assert len(calls) == 2 * 3  # a call for each layer and forward pass


def test_narrow_heads_take_a_mask_instead_of_flex_attention():
    """FlexAttention's kernel of GPUs refuses heads narrower than 16, of values too."""
    for keys, taken in (({}, False), ({"hidden_size": 64}, True), ({"head_dim": 16}, True)):
        plan = small_plan(**{**keys, "attention_config": [[["flash"], "all"]]})
        assert GPT(plan, ParallelGrid.single()).stage.blocks[0].attention.takes_block_masks == taken
