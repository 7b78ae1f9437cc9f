"""Blocks of RWKV 6: the formula written token by token, gpt-neox's initial values, and sizes that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from neox.architecture import BLOCKS, MicroBatch
from neox.model import GPT, BlockContext
from neox.model.rwkv import RWKVLayer
from neox.parallel import ParallelGrid
from tests.plans import SMALL, problem_keys, problems_of, small_plan

RWKV: dict[str, Any] = {"attention_config": [[["rwkv"], "all"]], "pos_emb": "none"}


def block_of(number: int, **keys: Any) -> RWKVLayer:
    """A block whose small products and vectors are drawn, so that no term of the formula vanishes."""
    plan = small_plan(**{**RWKV, **keys})
    model = GPT(plan, ParallelGrid.single())
    block = model.sequential[2 + number]
    assert isinstance(block, RWKVLayer)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if not name.endswith("time_decay"):
                parameter.copy_(parameter + 0.3 * torch.randn(parameter.shape, generator=generator))
    return block


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    centred = x - x.mean()
    return centred / (centred.square().mean() + epsilon).sqrt() * weight + bias


def formula(block: RWKVLayer, x: Tensor, heads: int, is_first: bool) -> Tensor:
    """RWKV 6 for one text [S, H], in float64 and token by token (arXiv:2404.05892, section 4.2)."""
    p = {name: parameter.double() for name, parameter in block.named_parameters()}
    x = x.double()

    def norm(name: str, token: Tensor) -> Tensor:
        return layer_norm(token, p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)

    width = p["att.key.weight"].shape[0] // heads
    states = [torch.zeros(width, width, dtype=torch.float64) for _ in range(heads)]
    for_time = torch.zeros(x.shape[1], dtype=torch.float64)
    for_channels = torch.zeros(x.shape[1], dtype=torch.float64)
    outputs = []
    for token in x:
        if is_first:
            token = norm("ln1", token)
        now = norm("ln1", token)
        change = for_time - now
        for_time = now
        low = torch.tanh((now + change * p["att.time_maa_x"].flatten()) @ p["att.time_maa_w1"])
        mixed = {}
        for place, name in enumerate("wkvrg"):
            shift = low[32 * place : 32 * (place + 1)] @ p["att.time_maa_w2"][place]
            mixed[name] = now + change * (p[f"att.time_maa_{name}"].flatten() + shift)
        r, k, v, g = (
            p[f"att.{module}.weight"] @ mixed[name]
            for module, name in (("receptance", "r"), ("key", "k"), ("value", "v"), ("gate", "g"))
        )
        inner = torch.tanh(mixed["w"] @ p["att.time_decay_w1"]) @ p["att.time_decay_w2"]
        kept = torch.exp(-torch.exp(p["att.time_decay"].flatten() + inner))
        normalised = []
        for head in range(heads):
            of_head = slice(head * width, (head + 1) * width)
            product = torch.outer(k[of_head], v[of_head])
            y = r[of_head] @ (states[head] + p["att.time_faaaa"][head][:, None] * product)
            states[head] = kept[of_head][:, None] * states[head] + product
            scale, bias = p["att.ln_x.weight"][of_head], p["att.ln_x.bias"][of_head]
            normalised.append(layer_norm(y, scale, bias, 1e-5 * 8**2))
        token = token + p["att.output.weight"] @ (torch.cat(normalised) * g * torch.sigmoid(g))

        now = norm("ln2", token)
        change = for_channels - now
        for_channels = now
        k = p["ffn.key.weight"] @ (now + change * p["ffn.time_maa_k"].flatten())
        r = p["ffn.receptance.weight"] @ (now + change * p["ffn.time_maa_r"].flatten())
        outputs.append(token + torch.sigmoid(r) * (p["ffn.value.weight"] @ torch.relu(k).square()))
    return torch.stack(outputs)


@settings(max_examples=3, deadline=None, derandomize=True, database=None)
@given(
    number=st.integers(0, 1),
    heads=st.sampled_from([1, 2, 4]),
    head_size=st.sampled_from([1, 6, 8]),
    ffn_dim=st.integers(1, 50),
    length=st.sampled_from([1, 16, 18]),
)
def test_it_computes_the_formula(number: int, heads: int, head_size: int, ffn_dim: int, length: int) -> None:
    sizes = {"dim_att": heads * head_size, "head_size": head_size, "num_attention_heads": heads, "ffn_dim": ffn_dim}
    block = block_of(number, **sizes)
    x = torch.randn(1, length, 32, generator=torch.Generator().manual_seed(length), requires_grad=True)
    context = BlockContext(torch.arange(length))
    in_fp32 = block(x, context)[0][0]
    block.double()
    x = x.detach().double().requires_grad_()
    weights = torch.linspace(-1, 1, length * 32, dtype=torch.float64).view(length, 32)
    found = block(x, context)[0][0]
    expected = formula(block, x[0], heads, number == 0)
    names, parameters = zip(*block.named_parameters(), strict=True)
    of_found = torch.autograd.grad((found * weights).sum(), (x, *parameters), materialize_grads=True)
    of_formula = torch.autograd.grad((expected * weights).sum(), (x, *parameters), materialize_grads=True)
    assert_close(in_fp32, expected, 1e-6, "in fp32")
    assert_close(found, expected, 1e-10, "output")
    for name, one, other in zip(("input", *names), of_found, of_formula, strict=True):
        assert_close(one, other, 1e-10, name)


def assert_close(found: Tensor, expected: Tensor, bound: float, name: str) -> None:
    """Compare to a bound relative to the largest number, or to 1."""
    difference = (found - expected).abs().max().item()
    assert difference < bound * max(1.0, expected.abs().max().item()), (name, difference)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_initial_values_are_gpt_neox_s(number: int) -> None:
    """Those that its constructor computes, for each channel."""
    plan = small_plan(**RWKV, num_layers=3, dim_att=24, head_size=6, num_attention_heads=4)
    block = GPT(plan, ParallelGrid.single()).sequential[2 + number]
    ratio = number / 2
    rest = 1 - number / 3
    base = [(channel / 32) ** rest for channel in range(32)]
    expected = {
        "att.time_maa_x": [1 - x for x in base],
        "att.time_maa_w": [1 - x for x in base],
        "att.time_maa_k": [1 - x for x in base],
        "att.time_maa_v": [1 - (x + 0.3 * ratio) for x in base],
        "att.time_maa_r": [1 - math.sqrt(x) for x in base],
        "att.time_maa_g": [1 - math.sqrt(x) for x in base],
        "att.time_decay": [-6 + 5 * (n / 23) ** (0.7 + 1.3 * ratio) for n in range(24)],
        "att.time_faaaa": [ratio * (1 - n / 23) + ((n + 1) % 3 - 1) * 0.1 for n in range(24)],
        "ffn.time_maa_k": [1 - x for x in base],
        "ffn.time_maa_r": [1 - x for x in base],
    }
    for name, values in expected.items():
        torch.testing.assert_close(block.get_parameter(name).flatten(), torch.tensor(values), atol=1e-6, rtol=0)
    for name in ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2"):
        small = block.get_parameter(f"att.{name}")
        assert small.abs().max() < 1e-4
        assert small.std().item() == pytest.approx(2e-4 / math.sqrt(12), rel=0.05)


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ({}, (4, 32, 96)),
        ({"num_attention_heads": None, "hidden_size": 128}, (2, 128, 448)),
        ({"dim_att": 48, "num_attention_heads": 3, "expansion_factor": 2}, (3, 48, 64)),
        ({"head_size": 2, "num_attention_heads": None, "intermediate_size": 100}, (16, 32, 96)),
        ({"ffn_dim": 41}, (4, 32, 41)),
    ],
)
def test_sizes_follow_from_gpt_neox_s_keys(keys: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    network = small_plan(**{**RWKV, **keys}).architecture
    assert (network.rwkv_heads, network.rwkv_width, network.rwkv_mlp_width) == sizes


@pytest.mark.parametrize(
    ("key", "world", "change"),
    [
        ("head_size", 1, {"head_size": 7, "num_attention_heads": None}),
        ("head_size", 1, {"head_size": 4}),
        ("head_size", 1, {"num_attention_heads": None}),
        ("num_attention_heads", 1, {"num_attention_heads": 5}),
        ("ffn_dim", 1, {"intermediate_size": 31}),
        ("expansion_factor", 1, {"ffn_dim": 32, "expansion_factor": 2}),
        ("mlp_width", 1, {"mlp_width": 64}),
        ("gpt_j_residual", 1, {"gpt_j_residual": True}),
        ("num_kv_heads", 1, {"num_kv_heads": 2}),
        ("head_dim", 1, {"head_dim": 8}),
        ("activation", 1, {"activation": "gelu"}),
        ("norm_placement", 1, {"norm_placement": "both"}),
        ("attention_dropout", 1, {"attention_dropout": 0.1}),
        ("use_mup", 1, {"use_mup": True, "mup_base_hidden_size": 16}),
        ("soft_prompt_tuning", 1, {"soft_prompt_tuning": {"enabled": True, "num_tokens": 3}}),
        ("moe_num_experts", 1, {"moe_num_experts": 2}),
        ("context_parallel_size", 2, {"context_parallel_size": 2}),
        ("sequence_parallel", 2, {"model_parallel_size": 2, "sequence_parallel": True}),
        ("model_parallel_size", 3, {"model_parallel_size": 3}),
        ("model_parallel_size", 2, {"model_parallel_size": 2, "ffn_dim": 33}),
    ],
)
def test_what_does_not_fit_is_refused_by_name(key: str, world: int, change: dict[str, Any]) -> None:
    assert problem_keys(world, **{**SMALL, **RWKV}) == []
    assert any(key in keys for keys in problem_keys(world, **{**SMALL, **RWKV, **change}))


def held_and_peak(run: Any) -> tuple[int, int]:
    """Return how many bytes a function leaves in memory, and the most that it held at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    assert profiler.profiler is not None
    held = 0
    most = 0
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    del kept
    return held, most


@pytest.mark.parametrize(
    ("heads", "head_size", "hidden", "ffn_dim", "length", "separates"),
    [(4, 48, 96, 400, 160, False), (2, 80, 256, 300, 120, False), (5, 40, 120, 512, 176, True)],
)
def test_memory_is_what_the_plan_says(
    heads: int, head_size: int, hidden: int, ffn_dim: int, length: int, separates: bool
) -> None:
    """What a block keeps, and what its time mixing computes again at once, for shapes that were not fitted to."""
    sizes = {"hidden_size": hidden, "dim_att": heads * head_size, "head_size": head_size, "ffn_dim": ffn_dim}
    plan = small_plan(**{**RWKV, **sizes, "num_attention_heads": None})
    block = GPT(plan, ParallelGrid.single()).sequential[3]
    assert isinstance(block, RWKVLayer)
    context = BlockContext(torch.arange(length))
    if separates:
        starts = torch.zeros(1, length, dtype=torch.long)
        starts[:, 50:] = 50
        context = BlockContext(torch.arange(length) - starts, document_starts=starts)
    x = torch.randn(1, length, hidden, requires_grad=True)
    parts = [torch.randn(1, length, heads * head_size, requires_grad=True) for _ in range(5)]
    gradient = torch.randn(1, length, heads * head_size)

    held, _ = held_and_peak(lambda: block(x, context)[0])
    _, most = held_and_peak(lambda: block.att._between(*parts, context).backward(gradient))
    batch = MicroBatch(
        length, length, token_shares=1, tp_size=1, bytes_per_number=4, separates_documents=separates, norm_bytes=0
    )
    kind = BLOCKS["rwkv"]
    assert kind.activations is not None
    assert kind.activations(plan.architecture, batch) == pytest.approx(held, rel=0.05)  # its input, not its output
    assert kind.recomputed(plan.architecture, batch) == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize("target", ["receptance", "key", "value", "gate", "output"])
def test_adapters_of_its_linear_layers_change_its_output(target: str) -> None:
    plan = small_plan(**RWKV, lora={"r": 2, "target": [target]})
    model = GPT(plan, ParallelGrid.single()).eval()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    modules = [mixing for mixing in ("att", "ffn") if hasattr(model.sequential[2].get_submodule(mixing), target)]
    parts = ("lora_A", "lora_B")
    expected = {f"sequential.{i}.{m}.{target}.adapter.{part}" for i in (2, 3) for m in modules for part in parts}
    assert trained == expected
    tokens = torch.arange(16).unsqueeze(0)
    before = model(tokens)
    with torch.no_grad():
        for name in trained:
            parameter = model.get_parameter(name)
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    assert (model(tokens) - before).abs().max() > 1e-4


def test_a_target_that_no_block_has_is_refused_by_name() -> None:
    problems = problems_of(1, 100, **{**SMALL, **RWKV, "lora": {"r": 2, "target": ["key", "query_key_value"]}})
    assert problems[0].keys[0] == "lora"
    assert "query_key_value" in problems[0].message
