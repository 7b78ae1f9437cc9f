"""Calls of the fused kernels of recurrent blocks: stand-ins check arguments as the packages do, and compute plainly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neox.errors import LaunchError
from neox.model import build_layer
from neox.model.context import BlockContext
from neox.model.mamba import one_token as mamba_token
from neox.model.mamba import selective_scan
from neox.model.mamba2 import chunked_scan
from neox.model.mamba2 import one_token as mamba2_token
from neox.ops import causal_convolution, gated_delta_recurrence, gated_delta_scan, wkv_recurrence, wkv_scan
from neox.ops import recurrent_kernels as kernels
from neox.parallel import ParallelGrid
from tests.plans import NETWORKS, SMALL, plan_of

BATCH, LENGTH = 2, 11
STARTS = torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3, 8, 8, 8], [0, 0, 0, 0, 0, 0, 6, 6, 6, 6, 6]])
POSITIONS = torch.arange(LENGTH) - STARTS


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, activation=None):
    """[B, C, S]; as causal_conv1d.cpp checks it."""
    assert x.stride(1) == 1
    assert x.stride(2) % 8 == 0
    assert x.stride(0) % 8 == 0
    assert x.shape[1] % 8 == 0
    assert 2 <= weight.shape[1] <= 4
    assert weight.shape[0] == x.shape[1]
    assert activation is None
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.shape == (x.shape[0], x.shape[2]))
    y = torch.zeros_like(x)
    width = weight.shape[1]
    for token in range(x.shape[2]):
        for back in range(min(width, token + 1)):
            part = x[:, :, token - back] * weight[:, width - 1 - back]
            if seq_idx is not None:
                part = part * (seq_idx[:, token] == seq_idx[:, token - back]).unsqueeze(-1)
            y[:, :, token] += part
    return y if bias is None else y + bias.unsqueeze(-1)


def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    """[B, F, S], states [B, D, S], A [F, D] in fp32."""
    assert u.shape == delta.shape
    assert u.dtype == delta.dtype == B.dtype == C.dtype
    assert A.dtype == torch.float32
    assert A.shape[1] == B.shape[1]
    assert u.stride(-1) == delta.stride(-1) == 1
    state = u.new_zeros(u.shape[0], *A.shape)
    outputs = []
    for token in range(u.shape[2]):
        y, state = mamba_token(u[:, :, token], delta[:, :, token], A, B[:, :, token], C[:, :, token], state)
        outputs.append(y)
    return torch.stack(outputs, -1)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, return_varlen_states=False,
):  # fmt: skip
    """x [B, S, N, P], dt [B, S, N], A [N], B and C [B, S, G, D]."""
    batch, length, heads, head_dim = x.shape
    assert dt.shape == (batch, length, heads)
    assert A.shape == (heads,)
    assert B.shape == C.shape
    assert return_final_states
    assert chunk_size & (chunk_size - 1) == 0
    assert not dt_softplus
    assert x.dtype == B.dtype == torch.bfloat16
    assert dt.dtype == A.dtype == torch.float32
    state = dt.new_zeros(batch, heads, head_dim, B.shape[-1]) if initial_states is None else initial_states
    outputs = []
    for token in range(length):
        if seq_idx is not None and token:
            assert seq_idx.dtype == torch.int32
            state = state * (seq_idx[:, token] == seq_idx[:, token - 1])[:, None, None, None]
        y, state = mamba2_token(x[:, token], dt[:, token], A, B[:, token], C[:, token], state)
        outputs.append(y)
    return torch.stack(outputs, 1).to(x.dtype), state


def of_sequences(rule: Callable[..., Any], inputs: list[Tensor], shape: tuple[int, ...], initial_state, cu_seqlens):
    """Apply a recurrence to rows, or to the sequences of the only row."""
    if cu_seqlens is None:
        return rule(*inputs, initial_state if initial_state is not None else torch.zeros(inputs[0].shape[0], *shape))
    assert inputs[0].shape[0] == 1
    assert initial_state is None
    assert cu_seqlens.dtype == torch.long
    outputs, states = [], []
    for first, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        y, state = rule(*(tensor[:, first:end] for tensor in inputs), torch.zeros(1, *shape))
        outputs.append(y)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):  # fmt: skip
    assert q.dtype == torch.bfloat16
    assert q.shape == k.shape
    assert q.shape[2] == v.shape[2]
    assert g.shape == beta.shape
    assert use_qk_l2norm_in_kernel
    assert output_final_state
    assert scale is None
    shape = (v.shape[2], k.shape[3], v.shape[3])
    return of_sequences(gated_delta_recurrence, [q, k, v, g, beta], shape, initial_state, cu_seqlens)


def chunk_rwkv6(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert r.dtype == torch.bfloat16
    assert r.shape == k.shape == w.shape
    assert u.shape == r.shape[2:]
    assert scale == 1.0

    def rule(r: Tensor, k: Tensor, v: Tensor, w: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, last = wkv_recurrence(r, k, v, w, u, state)
        return y.to(r.dtype), last

    return of_sequences(rule, [r, k, v, w], (r.shape[2], r.shape[3], v.shape[3]), initial_state, cu_seqlens)


MODULES = {
    "causal_conv1d": causal_conv1d_fn,
    "mamba_ssm.ops.selective_scan_interface": selective_scan_fn,
    "mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined,
    "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
    "fla.ops.rwkv6": chunk_rwkv6,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Stand-ins in place of the packages; lists the functions that are called."""
    made: list[str] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(function.__name__)
            return function(*args, **kwargs)

        return call

    for name, function in MODULES.items():
        module = ModuleType(name)
        setattr(module, function.__name__, noting(function))
        monkeypatch.setitem(sys.modules, name, module)
    return made


def both(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Results by the kernel and by torch's operations."""
    plain = function(*args, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "takes_kernel", lambda name, x: True)
        fused = function(*args, **kwargs)
    return fused, plain


@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["one", "documents"])
@pytest.mark.parametrize("has_state", [False, True])
def test_convolution(monkeypatch, calls, positions, has_state):
    torch.manual_seed(0)
    if has_state and positions is not None:
        pytest.skip("documents in a row have no state")
    x = torch.randn(BATCH, LENGTH, 21)[..., 3:19]  # strides that the kernel does not take
    before = torch.randn(BATCH, 3, 16) if has_state else None
    weight, bias = torch.randn(16, 4), torch.randn(16)
    fused, plain = both(monkeypatch, causal_convolution, x, weight, bias, before=before, positions=positions)
    torch.testing.assert_close(fused, plain)
    assert calls == ["causal_conv1d_fn"]
    both(monkeypatch, causal_convolution, x, torch.randn(16, 5), None)
    assert calls == ["causal_conv1d_fn"]  # not of 5 taps
    if has_state:
        fused, plain = both(monkeypatch, causal_convolution, x[:, :1], weight, bias, before=before)
        assert torch.equal(fused[0], plain[0])
        assert calls == ["causal_conv1d_fn"]  # not for steps of one token


def mamba2_inputs() -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(BATCH, LENGTH, 4, 3)
    dt = F.softplus(torch.randn(BATCH, LENGTH, 4))
    b, c = torch.randn(2, BATCH, LENGTH, 2, 5).bfloat16()
    return [x.bfloat16(), dt, -torch.rand(4), b, c]


@pytest.mark.parametrize("case", ["one", "documents", "state"])
def test_mamba2(monkeypatch, calls, case):
    state = torch.randn(BATCH, 4, 3, 5) if case == "state" else None
    starts = STARTS if case == "documents" else None
    inputs = mamba2_inputs()
    fused, plain = both(monkeypatch, chunked_scan, *inputs, state, starts)
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-2, atol=1e-2)  # the kernel's outputs have 16 bits
    torch.testing.assert_close(fused[1], plain[1], rtol=1e-4, atol=1e-5)
    assert calls == ["mamba_chunk_scan_combined"]
    calls.clear()
    both(monkeypatch, chunked_scan, *(tensor.float() for tensor in inputs), state, starts)
    assert calls == []  # not in fp32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_mamba2_hand_their_type_to_the_kernel(monkeypatch, calls, dtype):
    plan = plan_of(**SMALL | NETWORKS["mamba2"])
    (index, *_) = (number for number, layer in enumerate(plan.layers) if layer.kind == "block")
    block = build_layer(plan, index, ParallelGrid.single(), device=torch.device("cpu"), dtype=dtype)
    monkeypatch.setattr(kernels, "takes_kernel", lambda name, x: name == kernels.MAMBA)
    width = plan.architecture.hidden_size
    block.mixer(torch.zeros(1, 8, width, dtype=dtype), BlockContext(torch.arange(8)[None]))
    assert calls == ["mamba_chunk_scan_combined"] * (dtype == torch.bfloat16)


def test_mamba(calls):
    torch.manual_seed(2)
    x, dt = torch.randn(BATCH, LENGTH, 6), F.softplus(torch.randn(BATCH, LENGTH, 6))
    decay, b, c = -torch.rand(6, 5), torch.randn(BATCH, LENGTH, 5), torch.randn(BATCH, LENGTH, 5)
    plain, _ = selective_scan(x, dt, decay, b, c, torch.zeros(BATCH, 6, 5))
    torch.testing.assert_close(kernels.selective_scan(x, dt, decay, b, c), plain, rtol=1e-4, atol=1e-5)
    assert calls == ["selective_scan_fn"]


@pytest.mark.parametrize("case", ["one", "documents", "state"])
@pytest.mark.parametrize("rule", ["gated_delta", "rwkv"])
def test_linear_attention(monkeypatch, calls, rule, case):
    torch.manual_seed(3)
    state = torch.randn(BATCH, 4, 8, 6) if case == "state" else None
    starts = STARTS if case == "documents" else None
    keys, values = torch.randn(BATCH, LENGTH, 2, 8).bfloat16(), torch.randn(BATCH, LENGTH, 4, 6).bfloat16()
    function: Callable[..., Any]
    inputs: list[Tensor]
    if rule == "gated_delta":
        queries = torch.randn(BATCH, LENGTH, 2, 8).bfloat16()
        function, name = gated_delta_scan, "chunk_gated_delta_rule"
        inputs = [queries, keys, values, -torch.rand(BATCH, LENGTH, 4), torch.rand(BATCH, LENGTH, 4)]
    else:
        r, k = torch.randn(2, BATCH, LENGTH, 4, 8).bfloat16()
        function, name = wkv_scan, "chunk_rwkv6"
        inputs = [r, k, values, -torch.rand(BATCH, LENGTH, 4, 8), torch.randn(4, 8)]
    fused, plain = both(monkeypatch, function, *inputs, state, starts)
    assert fused[0].dtype == plain[0].dtype
    torch.testing.assert_close(fused, plain, rtol=2e-2, atol=2e-2)
    assert calls == [name]
    calls.clear()
    inputs[1] = inputs[1].float()
    both(monkeypatch, function, *inputs, state, starts)
    assert calls == []  # not in fp32


def test_without_packages_and_in_deterministic_runs_there_are_no_kernels(monkeypatch):
    x = torch.zeros(1, 2, 8)
    assert not kernels.takes_kernel(kernels.MAMBA, x)
    monkeypatch.setattr(kernels, "has_fast_path", lambda name, device: True)
    assert kernels.takes_kernel(kernels.MAMBA, x)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not kernels.takes_kernel(kernels.MAMBA, x)


def test_a_package_that_does_not_fit_this_torch_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "causal_conv1d", ModuleType("causal_conv1d"))
    with pytest.raises(LaunchError, match="causal-conv1d"):
        kernels.convolved(torch.zeros(1, 2, 8), torch.zeros(8, 4), None, None)


@pytest.mark.parametrize(
    ("kind", "documents"),
    [
        pytest.param("mamba", False, marks=pytest.mark.slow),
        pytest.param("mamba", True, marks=pytest.mark.slow),
        ("mamba2", False),
        pytest.param("mamba2", True, marks=pytest.mark.slow),
        ("gated_delta", False),  # with documents, the kernel takes their ends, whose number no graph knows
        ("rwkv", False),
    ],
)
def test_a_compiled_block_calls_kernels_without_a_graph_break(monkeypatch, calls, kind, documents):
    for name, function in MODULES.items():  # as a package gives them: tracing refuses the fixture's
        setattr(sys.modules[name], function.__name__, function)
    plan = plan_of(**SMALL | NETWORKS[kind])
    (index, *_) = (number for number, layer in enumerate(plan.layers) if layer.kind == "block")
    block = build_layer(plan, index, ParallelGrid.single(), device=torch.device("cpu"), dtype=torch.bfloat16)
    monkeypatch.setattr(kernels, "takes_kernel", lambda name, x: True)
    starts = STARTS[:1] if documents else None
    context = BlockContext(POSITIONS[:1] if documents else torch.arange(LENGTH)[None], document_starts=starts)
    x = torch.zeros(1, LENGTH, plan.architecture.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(lambda x: block(x, context))(x)
    assert explained.graph_break_count == 0, explained.break_reasons


def test_mixers_import_their_kernels_when_they_are_built(monkeypatch):
    imported = []
    monkeypatch.setattr(kernels, "machine_has_fast_path", lambda name: True)
    monkeypatch.setattr(kernels.importlib, "import_module", lambda name: imported.append(name))
    for kind in ("mamba", "mamba2", "gated_delta", "rwkv"):
        plan = plan_of(**SMALL | NETWORKS[kind])
        (index, *_) = (number for number, layer in enumerate(plan.layers) if layer.kind == "block")
        build_layer(plan, index, ParallelGrid.single(), device=torch.device("meta"), dtype=torch.bfloat16)
    assert set(imported) == set(MODULES)


def test_a_package_that_breaks_ends_no_run_that_does_not_use_it(monkeypatch):
    """Deterministic runs and weights on a CPU import none; elsewhere an error waits for the call."""
    imported = []

    def broken(name):
        imported.append(name)
        raise ValueError(name)

    monkeypatch.setattr(kernels, "machine_has_fast_path", lambda name: True)
    monkeypatch.setattr(kernels.importlib, "import_module", broken)
    plan = plan_of(**SMALL | NETWORKS["rwkv"])
    (index, *_) = (number for number, layer in enumerate(plan.layers) if layer.kind == "block")
    build = partial(build_layer, plan, index, ParallelGrid.single(), dtype=torch.bfloat16)
    build(device=torch.device("cpu"))
    assert imported == []
    build(device=torch.device("meta"))
    assert imported == ["fla.ops.rwkv6"]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    build(device=torch.device("meta"))
    assert imported == ["fla.ops.rwkv6"]
