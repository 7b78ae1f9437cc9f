"""What others reported of Mamba, Gated DeltaNet and RWKV elsewhere, tried here against sums written out in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neox.model import GPT, Context
from neox.model.mamba2 import GatedGroupNorm, chunked_scan
from neox.ops import gated_delta_scan, wkv_scan
from neox.optim.groups import planned_groups
from neox.parallel import ParallelGrid
from tests.plans import NETWORKS, SMALL, plan_of

RECURRENT = ("mamba", "mamba2", "mamba2_mlp", "gated_delta", "rwkv")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(function: Any, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    return list(torch.autograd.grad(function(*leaves).double().sin().sum(), leaves))


def wkv_sums(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """RWKV 6 as its sum over earlier tokens, each with the product of the decays between."""
    rows = []
    for token in range(r.shape[1]):
        total = ((r[:, token] * k[:, token] * u).sum(-1, keepdim=True)) * v[:, token]
        for earlier in range(token):
            decay = w[:, earlier + 1 : token].sum(1).exp()
            total = total + (r[:, token] * k[:, earlier] * decay).sum(-1, keepdim=True) * v[:, earlier]
        rows.append(total)
    return torch.stack(rows, 1)


@pytest.mark.parametrize("least", [-0.01, -5.0, -200.0])
def test_rwkv_gradients_stay_finite_where_channels_forget_at_once(least: float) -> None:
    """NaN in the backward pass for very small decays: https://github.com/fla-org/flash-linear-attention/issues/77."""
    inputs = [drawn(1, 37, 2, 8, seed=number) for number in range(3)]
    decays = least * drawn(1, 37, 2, 8, seed=3).abs()
    bonus = drawn(2, 8, seed=4)
    found = gradients(lambda *all: wkv_scan(*all)[0], [*inputs, decays, bonus])
    expected = gradients(wkv_sums, [*inputs, decays, bonus])
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_rwkv_gradients_of_decays_are_as_precise_in_bf16_as_those_of_keys() -> None:
    """Errors of 8 % in the decays' gradient: https://github.com/fla-org/flash-linear-attention/issues/29."""
    inputs = [drawn(1, 80, 2, 16, seed=number) for number in range(3)]
    inputs += [-F.softplus(drawn(1, 80, 2, 16, seed=3)), drawn(2, 16, seed=4)]
    inputs = [tensor.bfloat16() for tensor in inputs]
    found = gradients(lambda *all: wkv_scan(*all)[0], inputs)
    expected = gradients(wkv_sums, [tensor.double() for tensor in inputs])
    for name, one, other in zip("rkvwu", found, expected, strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert error < 5e-3, name


@pytest.mark.parametrize("least", [-0.01, -20.0, -300.0])
def test_delta_rule_overflows_nowhere_for_strong_decays(least: float) -> None:
    """exp of a positive sum of decays is infinite: https://github.com/fla-org/flash-linear-attention/pull/649."""

    def steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        state = q.new_zeros(1, 2, 8, 6)
        rows = []
        for t in range(q.shape[1]):
            state = state * g[:, t].exp()[..., None, None]
            read = torch.einsum("bnkv,bnk->bnv", state, k[:, t])
            state = state + torch.einsum("bnk,bnv->bnkv", k[:, t], (v[:, t] - read) * b[:, t].unsqueeze(-1))
            rows.append(torch.einsum("bnkv,bnk->bnv", state, q[:, t]) * 8**-0.5)
        return torch.stack(rows, 1)

    inputs = [drawn(1, 150, 2, 8), drawn(1, 150, 2, 8, seed=1), drawn(1, 150, 2, 6, seed=2)]
    inputs += [least * drawn(1, 150, 2, seed=3).abs(), drawn(1, 150, 2, seed=4).sigmoid()]
    torch.testing.assert_close(gated_delta_scan(*inputs)[0], steps(*inputs), rtol=1e-8, atol=1e-8)
    found = gradients(lambda *all: gated_delta_scan(*all)[0], inputs)
    for one, other in zip(found, gradients(steps, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


def test_delta_rule_has_gradients_at_keys_of_zero() -> None:
    """The norm of padding's keys has a singular gradient: https://github.com/AI-Hypercomputer/maxtext/pull/5295."""
    inputs = [drawn(1, 9, 2, 8), drawn(1, 9, 2, 8, seed=1), drawn(1, 9, 2, 6, seed=2)]
    inputs += [-drawn(1, 9, 2, seed=3).abs(), drawn(1, 9, 2, seed=4).sigmoid()]
    for tensor in inputs[:2]:
        tensor[:, :4] = 0
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = gradients(lambda *all: gated_delta_scan(*all)[0], [tensor.to(dtype) for tensor in inputs])
        assert all(gradient.isfinite().all() for gradient in found)


def test_the_norm_of_several_groups_and_its_gradient() -> None:
    """The backward pass took all channels for one group: https://github.com/state-spaces/mamba/pull/547."""
    norm = GatedGroupNorm(12, 3, ParallelGrid.single(), over_ranks=False, eps=1e-5, dtype=torch.float64)
    with torch.no_grad():
        norm.scale.copy_(drawn(12, seed=2))

    def formula(y: Tensor, gate: Tensor) -> Tensor:
        gated = y * gate * torch.sigmoid(gate)
        groups = [part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() for part in gated.split(4, dim=-1)]
        return torch.cat(groups, -1) * norm.scale

    inputs = [drawn(2, 5, 12), drawn(2, 5, 12, seed=1)]
    torch.testing.assert_close(norm(*inputs), formula(*inputs), rtol=1e-6, atol=1e-6)  # gates are computed in fp32
    for one, other in zip(gradients(norm, inputs), gradients(formula, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_prompt_read_in_pieces_of_any_length(name: str) -> None:
    """A state that covers less than its block says: https://github.com/vllm-project/vllm/pull/34587."""
    model = GPT(plan_of(**{**SMALL, "init_method_std": 0.2, **NETWORKS[name]}), ParallelGrid.single()).eval()
    tokens = torch.randint(0, 60, (2, 15), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = model(tokens)
        for pieces in ((15,), (1, 2, 12), (7, 1, 1, 6), (2, 2, 2, 9)):
            cache = model.new_cache(2, 15)
            found = [model(part, Context(cache=cache)) for part in tokens.split(pieces, dim=1)]
            torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gated_delta"])
@pytest.mark.parametrize("init_method", ["normal", "small_init", "xavier_normal"])
def test_steps_keep_their_initial_values_whatever_initialises_the_rest(name: str, init_method: str) -> None:
    """The model's initialisation overwrote the mixer's: https://github.com/athms/mad-lab/issues/3."""
    keys = {**SMALL, **NETWORKS[name], "init_method": init_method}
    model = GPT(plan_of(**keys), ParallelGrid.single())
    steps = [p for path, p in model.named_parameters() if path.endswith(("dt_bias", "dt_proj.bias"))]
    assert steps
    for parameter in steps:
        sizes = F.softplus(parameter.detach().double())
        assert 0.000999 <= sizes.min() <= sizes.max() <= 0.1001
        assert parameter.detach().std() > 0.1  # spread over them
    decays = [p.detach() for path, p in model.named_parameters() if path.endswith("A_log")]
    if name == "mamba":
        assert all(torch.equal(one[0], torch.arange(1, one.shape[1] + 1).log()) for one in decays)
    assert all(one.max() <= math.log(16) + 1e-6 for one in decays)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_padded_row_is_the_row_alone_whatever_its_padding_holds(name: str) -> None:
    """Padding leaked through convolution and state: https://github.com/huggingface/transformers/issues/31540."""
    model = GPT(plan_of(**{**SMALL, "init_method_std": 0.2, **NETWORKS[name]}), ParallelGrid.single()).eval()
    row = torch.randint(0, 60, (1, 6), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        alone = model(row)
        for filler in (0, 7, 59):
            padded = torch.cat((torch.full((1, 5), filler), row), 1)
            beside = torch.randint(0, 60, (1, 11), generator=torch.Generator().manual_seed(3))
            cache = model.new_cache(2, 11)
            cache.reset(start=torch.tensor([0, 5]))
            found = model(torch.cat((beside, padded)), Context(cache=cache))
            torch.testing.assert_close(found[1:, 5:], alone, rtol=1e-4, atol=1e-4)


def written_out(
    keys: Tensor, values: Tensor, queries: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and the last state of S <- exp(f) S + k v^T, o = q S, token by token; log decays [B, S, N, K or 1]."""
    outputs = []
    for token in range(keys.shape[1]):
        state = log_decay[:, token].exp().unsqueeze(-1) * state + keys[:, token, :, :, None] * values[:, token, :, None]
        outputs.append((queries[:, token].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 130])
def test_rows_around_whole_chunks(length: int) -> None:
    """A whole chunk was padded by one more: https://github.com/huggingface/transformers/pull/32599."""
    x, b, c = drawn(1, length, 4, 6), drawn(1, length, 2, 8, seed=1), drawn(1, length, 2, 8, seed=2)
    dt, decay = F.softplus(drawn(1, length, 4, seed=3)), -drawn(4, seed=4).abs()
    state = drawn(1, 4, 6, 8, seed=5)
    keys, queries = (tensor.repeat_interleave(2, 2) for tensor in (b, c))  # two heads share a group
    expected, last = written_out(keys, x * dt.unsqueeze(-1), queries, (dt * decay).unsqueeze(-1), state.mT)
    y, found = chunked_scan(*(tensor.float() for tensor in (x, dt, decay, b, c, state)))
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.double(), last.mT, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [3, 16, 37])
def test_rwkv_continues_a_state_by_chunks(length: int) -> None:
    """A chunked kernel was wrong with a first state: https://github.com/fla-org/flash-linear-attention/issues/351."""
    r, k, v = (drawn(2, length, 3, 5, seed=number) for number in range(3))
    decays, bonus, state = -drawn(2, length, 3, 5, seed=3).abs(), drawn(3, 5, seed=4), drawn(2, 3, 5, 5, seed=5)
    outputs = []
    expected = state
    for token in range(length):
        own = (r[:, token] * k[:, token] * bonus).sum(-1, keepdim=True) * v[:, token]
        outputs.append((r[:, token].unsqueeze(-2) @ expected).squeeze(-2) + own)
        _, expected = written_out(
            k[:, token, None], v[:, token, None], r[:, token, None], decays[:, token, None], expected
        )
    y, last = wkv_scan(r, k, v, decays, bonus, state)
    torch.testing.assert_close(y, torch.stack(outputs, 1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(last, expected, rtol=1e-9, atol=1e-9)


def test_slow_decays_keep_their_digits_in_bf16() -> None:
    """exp of a decay's logarithm in 16 bits: https://github.com/state-spaces/mamba/pull/923."""
    plan = plan_of(**{**SMALL, **NETWORKS["mamba2"]})
    mixer = GPT(plan, ParallelGrid.single(), dtype=torch.bfloat16).sequential[2].mixer
    logarithms = torch.linspace(-4.0, 2.7, mixer.A_log.numel())
    with torch.no_grad():
        mixer.A_log.copy_(logarithms)
    assert torch.equal(
        mixer.fp32("A_log"), logarithms
    )  # rounded to bf16, a state would be off by 30 % after 100 tokens
    x, b = drawn(1, 200, 8, 8).bfloat16(), drawn(1, 200, 1, 8, seed=1).bfloat16()
    dt = torch.full((1, 200, 8), 0.05)
    decay = -mixer.fp32("A_log").exp()
    _, last = chunked_scan(x, dt, decay, b, b, None)
    wide = dt.double() * -logarithms.double().exp()
    keys = b.double().repeat_interleave(8, 2)
    _, expected = written_out(keys, x.double() * 0.05, keys, wide.unsqueeze(-1), torch.zeros(1, 8, 8, 8).double())
    torch.testing.assert_close(last.double(), expected.mT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RECURRENT)
def test_states_are_fp32_in_bf16_and_the_same_read_whole_or_by_tokens(name: str) -> None:
    """States of 16 bits: https://github.com/vllm-project/vllm/issues/13466; a token's shift that decoding did not
    store: https://github.com/ggml-org/llama.cpp/pull/11445; a piece shorter than the convolution's state:
    https://github.com/vllm-project/vllm/pull/56196."""
    plan = plan_of(**{**SMALL, "init_method_std": 0.2, **NETWORKS[name]})
    torch.manual_seed(0)
    narrow = GPT(plan, ParallelGrid.single(), dtype=torch.bfloat16).eval()
    cache = narrow.new_cache(1, 4)
    assert all(tensor.dtype == torch.float32 for tensors in cache.states.values() for tensor in tensors)
    model = GPT(plan, ParallelGrid.single()).eval()
    tokens = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    states = []
    with torch.inference_mode():
        for size in (9, 1, 2):
            cache = model.new_cache(2, 9)
            for part in tokens.split(size, dim=1):
                model(part, Context(cache=cache))
            states.append([tensor.clone() for tensors in cache.states.values() for tensor in tensors])
    for found in states[1:]:
        for one, other in zip(found, states[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RECURRENT)
def test_documents_shorter_than_a_convolution(name: str) -> None:
    """State and convolution went over the boundaries of packed samples: https://github.com/pytorch/torchtitan/pull/3892,
    https://github.com/NVIDIA-NeMo/Automodel/pull/2147; a boundary that fell into a share: prime-rl PR 3003."""
    plan = plan_of(**{**SMALL, "init_method_std": 0.2, **NETWORKS[name], "reset_attention_mask": True})
    model = GPT(plan, ParallelGrid.single()).eval()
    lengths = (1, 2, 1, 3, 5, 1, 3)
    tokens = torch.randint(0, 60, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    firsts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    starts = firsts.repeat_interleave(torch.tensor(lengths)).unsqueeze(0)
    packed = model(tokens, Context(document_starts=starts)).detach()
    for part, alone in zip(packed.split(lengths, dim=1), tokens.split(lengths, dim=1), strict=True):
        torch.testing.assert_close(part, model(alone).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gated_delta", "rwkv"])
def test_weight_decay_leaves_decays_and_steps_alone(name: str) -> None:
    """A mark that no optimizer read: https://github.com/state-spaces/mamba/issues/798, athms/mad-lab/issues/5."""
    plan = plan_of(**{**SMALL, **NETWORKS[name], "weight_decay": 0.1})
    model = GPT(plan, ParallelGrid.single())
    found: dict[int, float] = {}
    for group in planned_groups(plan, model.named_parameters()):
        found |= {id(parameter): group.get("weight_decay", 0.1) for parameter in group["params"]}
    decayed = {
        path.split(".", 3)[-1] for path, p in model.named_parameters() if found[id(p)] and "sequential.2." in path
    }
    without = ("A_log", "D", "dt_bias", "time_decay", "time_faaaa", "conv1d.bias", "norm.scale", "ln_x.weight")
    assert decayed
    assert not {path for path in decayed if path.endswith(without)}
