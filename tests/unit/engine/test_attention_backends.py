"""`attention_backend`: torch runs the kernel that was asked for; what a kernel cannot do is refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from neox.devices import DEVICES, AttentionBackend
from neox.engine.build_engine import build_model, choose_attention_backend
from neox.errors import ConfigError
from neox.model import GPT
from neox.objectives import build_objective
from neox.ops import core_attention
from neox.parallel import ParallelGrid
from tests.losses import causal_lm_loss
from tests.plans import SMALL, problem_keys, small_plan

KEY = "attention_backend"
FLASH: dict[str, Any] = {"attention_config": [[["flash"], "all"]]}
LATENT = {"norm": "rmsnorm", "attention_config": [[["latent"], "all"]], "kv_lora_rank": 12, "use_bias_in_qkv": False}
OPERATIONS = {
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "math": "aten::_scaled_dot_product_attention_math",
}


def test_every_backend_says_which_devices_have_it():
    kernels = {kernel for kind in DEVICES.values() for kernel in kind.attention}
    assert {*kernels, "auto"} == set(get_args(AttentionBackend))


@pytest.mark.parametrize("backend", OPERATIONS)
def test_the_kernel_is_the_one_that_was_asked_for(backend: AttentionBackend):
    """With four heads of queries for two of keys, and heads whose values are as wide as their keys."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 24, 4, 16, generator=generator)
    k, v = (torch.randn(2, 24, 2, 16, generator=generator) for _ in range(2))
    wanted = core_attention(q, k, v, impl="eager")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = core_attention(q, k, v, impl="flash", backend=backend)
    torch.testing.assert_close(found, wanted)
    names = {event.key for event in profile.key_averages()}
    assert OPERATIONS[backend] in names
    assert not any(name in names for other, name in OPERATIONS.items() if other != backend)


def test_a_network_trains_with_the_chosen_kernel():
    """Windows give `math` a mask of pairs; losses and gradients are those of `auto`."""
    keys = {"attention_config": ["flash", "flash"], "sliding_window_width": 5}
    results = []
    for backend in ("auto", "math"):
        plan = small_plan(**keys, **{KEY: backend})
        model = GPT(plan, ParallelGrid.single())
        choose_attention_backend(model, plan)
        tokens = torch.arange(32).view(2, 16) * 7 % 90
        loss = causal_lm_loss(model, tokens, tokens.roll(-1, 1), torch.ones(2, 16))
        loss.backward()
        results.append((loss.detach(), model.get_parameter("sequential.2.attention.query_key_value.weight").grad))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("backend", ["cudnn", "flex", "memory_efficient"])
def test_a_device_without_the_kernel_is_refused(backend: str):
    plan = small_plan(**FLASH, **{KEY: backend})
    with pytest.raises(ConfigError) as raised:
        build_model(plan, ParallelGrid.single(), build_objective(plan), torch.device("cpu"))
    assert raised.value.problems[0].keys == (KEY,)


@pytest.mark.parametrize(
    ("other", "backend", "keys"),
    [
        ("attention_config", "math", {"attention_config": [[["global"], "all"]]}),
        ("attention_config", "flash", {**FLASH, "sliding_window_width": 5}),
        ("attention_config", "flash", LATENT),
        ("reset_attention_mask", "flash", {**FLASH, "reset_attention_mask": True}),
        ("pos_emb", "flex", {**FLASH, "pos_emb": "alibi"}),
        ("attention_dropout", "flex", {**FLASH, "attention_dropout": 0.1}),
        ("train_impl", "flash", {**FLASH, "train_impl": "rm"}),
    ],
)
def test_what_a_kernel_cannot_compute_is_refused(other: str, backend: str, keys: dict[str, Any]):
    assert (KEY, other) in problem_keys(1, 100, **{**SMALL, **keys, KEY: backend})


def test_context_ranks_that_gather_keys_are_refused_with_flash():
    keys = {**SMALL, **FLASH, "context_parallel_size": 2, KEY: "flash"}
    assert (KEY, "context_parallel_kind") in problem_keys(2, 100, **keys)
    assert not problem_keys(2, 100, **{**keys, "context_parallel_kind": "ulysses"})
