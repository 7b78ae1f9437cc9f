"""Norms compute their formulas, in fp32 whatever the type of the hidden states."""

from __future__ import annotations

import pytest
import torch

from neox.ops import NORMS

FORMULAS = {
    "layernorm": lambda x, eps: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + eps).sqrt(),
    "rmsnorm": lambda x, eps: x / (x.square().mean(-1, keepdim=True) + eps).sqrt(),
    "rmsnorm_v2.0": lambda x, eps: x / (x.square().mean(-1, keepdim=True).sqrt() + eps),
    "scalenorm": lambda x, eps: x / x.norm(dim=-1, keepdim=True).clamp(min=eps),
}
FORMULAS["non_parametric_layernorm"] = FORMULAS["layernorm"]
FORMULAS["layernorm_no_bias"] = FORMULAS["layernorm"]
FORMULAS["rmsnorm_1p"] = FORMULAS["rmsnorm"]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_formula(name, eps):
    torch.manual_seed(0)
    norm = NORMS[name](24, eps=eps)
    x = torch.randn(3, 5, 24) * torch.tensor([1e-3, 0.1, 1.0, 30.0, 0.0]).unsqueeze(1)
    for p in norm.parameters():
        torch.nn.init.uniform_(p, 0.5, 2.0)
    scale, *shift = [*norm.parameters()] or [torch.ones(())]
    if name == "rmsnorm_1p":
        scale = 1.0 + scale
    expected = scale.double() * FORMULAS[name](x.double(), eps) + sum(shift)
    torch.testing.assert_close(norm(x).double(), expected.double(), rtol=2e-5, atol=1e-5)
    small = norm.to(torch.bfloat16)(x.bfloat16())
    assert small.dtype == torch.bfloat16
    if name != "layernorm":  # bf16 rounds its shift
        torch.testing.assert_close(small.double(), expected.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", NORMS)
def test_the_gradient_at_a_vector_of_zeros_is_the_slope_there(name):
    """Tokens that no expert takes, and gated MLPs of ReLU, leave vectors that are exactly zero."""
    norm = NORMS[name](24, eps=0.5).double()
    weights, direction = torch.randn(2, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.zeros(24, dtype=torch.float64, requires_grad=True)
    (norm(x) * weights).sum().backward()
    step = 1e-6 * direction
    change = (norm(step) - norm(-step)).detach()
    slope = (change * weights).sum() / 2e-6
    torch.testing.assert_close((x.grad * direction).sum(), slope, rtol=1e-4, atol=1e-4)
