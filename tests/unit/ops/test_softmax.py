"""The masked softmax: the torch reference against arithmetic by hand, the Triton kernel against the reference."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from neox.errors import NeoXError
from neox.ops import scale_mask_softmax
from tests.errors import raises_naming

pytest.importorskip("triton", reason="triton is not installed")


def test_reference_masks_later_positions_and_sums_to_one():
    scores = torch.tensor([[[[0.0, 9.0, 9.0], [1.0, 3.0, 9.0], [0.0, 0.0, 0.0]]]])
    weights = scale_mask_softmax(scores, 0.5)[0, 0]
    e = torch.e
    expected = torch.tensor([[1.0, 0.0, 0.0], [1 / (1 + e), e / (1 + e), 0.0], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(weights, expected)


def test_reference_sums_in_fp32_under_bf16():
    scores = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = scale_mask_softmax(scores.double(), 1.5)
    torch.testing.assert_close(scale_mask_softmax(scores, 1.5), exact.bfloat16())


def test_reference_masks_padding_and_gives_a_query_that_sees_nothing_equal_weights():
    scores = torch.tensor([[[[0.0, 1.0, 9.0], [1.0, 0.0, 9.0]]]]).expand(2, -1, -1, -1)
    visible = torch.tensor([[True, True, False], [False, False, False]])[:, None, None]
    weights = scale_mask_softmax(scores, 1.0, causal=False, visible=visible)
    seen = 1 / (1 + torch.e)
    torch.testing.assert_close(weights[0, 0], torch.tensor([[seen, 1 - seen, 0.0], [1 - seen, seen, 0.0]]))
    torch.testing.assert_close(weights[1, 0], torch.full((2, 3), 1 / 3))


def test_kernel_on_a_cpu_is_an_error_and_not_a_fallback():
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("under TRITON_INTERPRET the kernel does run on a CPU")
    with raises_naming(NeoXError, "GPU"):
        scale_mask_softmax(torch.zeros(1, 1, 4, 4), 1.0, impl="triton")


# Run apart: TRITON_INTERPRET must be set before triton is imported, and would change it for every later test.
INTERPRETED = """
import sys, torch
from neox.ops import scale_mask_softmax
from tests.errors import raises_naming

bounds = {torch.float32: 2e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
lengths = {torch.float32: (1, 17), torch.float16: (5,), torch.bfloat16: (5,)}  # the interpreter is slow
if sys.argv[1] == "all":
    lengths = dict.fromkeys(bounds, (1, 5, 33, 48))
for dtype, atol in bounds.items():
    for length in lengths[dtype]:
        generator = torch.Generator().manual_seed(length)
        scores = (torch.randn(1, 2, length, length, generator=generator) * 4).to(dtype)
        grad = torch.randn(1, 2, length, length, generator=generator).to(dtype)
        results = []
        for impl in ("torch", "triton"):
            leaf = scores.clone().requires_grad_()
            weights = scale_mask_softmax(leaf, 0.7, impl)
            weights.backward(grad)
            results.append((weights.detach(), leaf.grad))
        (weights, dx), (fused, fused_dx) = results
        assert fused.dtype == dtype and not fused.triu(1).any() and not fused_dx.triu(1).any()
        torch.testing.assert_close(fused, weights, atol=atol, rtol=atol)
        torch.testing.assert_close(fused_dx, dx, atol=5 * atol, rtol=5 * atol)
        visible = (torch.arange(length) < torch.tensor([length, max(1, length // 2)]).unsqueeze(1))[:, None, None]
        for mask in (visible, None):
            padded = []
            for impl in ("torch", "triton"):
                leaf = scores.expand(2, -1, -1, -1).clone().requires_grad_()
                weights = scale_mask_softmax(leaf, 0.7, impl, causal=False, visible=mask)
                weights.backward(grad.expand(2, -1, -1, -1))
                padded.append((weights.detach(), leaf.grad))
            (weights, dx), (fused, fused_dx) = padded
            assert mask is None or not fused.masked_select(~mask).any() and not fused_dx.masked_select(~mask).any()
            torch.testing.assert_close(fused, weights, atol=atol, rtol=atol)
            torch.testing.assert_close(fused_dx, dx, atol=5 * atol, rtol=5 * atol)
# Gradients by finite differences too, so that reference and kernel cannot share a mistake.
x = torch.randn(1, 1, 5, 5, requires_grad=True)
check = dict(eps=1e-2, atol=2e-3, rtol=1e-2)
assert torch.autograd.gradcheck(lambda s: scale_mask_softmax(s, 0.7, "triton"), (x,), nondet_tol=0.0, **check)

# torch.compile leaves the kernels whole.
def weighted(s):
    return scale_mask_softmax(s * 2.0, 0.7, "triton").square().sum()


grads = []
for function in (weighted, torch.compile(weighted, fullgraph=True, backend="aot_eager")):
    leaf = x.detach().clone().requires_grad_()
    function(leaf).backward()
    grads.append(leaf.grad)
torch.testing.assert_close(*grads)
print("agreed")
"""


@pytest.mark.parametrize("sizes", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_kernel_agrees_with_the_reference_in_the_interpreter(sizes):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED, sizes], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "agreed"
