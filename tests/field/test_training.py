"""Reports about training's own meanings: experts, padding, validation, schedules, mismatched answers."""

import math

import pytest
import torch
from torch import Tensor

from neox.ops import sinkhorn
from neox.ops.routing import log_sinkhorn


def equal_shares(logits: Tensor) -> Tensor:
    """Return the logarithm of the assignment with equal shares in fp64, after as many rounds as it takes."""
    logits = logits.double()
    tokens, experts = logits.shape
    columns = torch.zeros(1, experts, dtype=torch.float64)
    for _ in range(20_000):
        rows = -math.log(tokens) - (logits + columns).logsumexp(1, keepdim=True)
        scaled = -math.log(experts) - (logits + rows).logsumexp(0, keepdim=True)
        change = (scaled - columns).abs().max()
        columns = scaled
        if change < 1e-9:
            return logits + rows + columns
    raise AssertionError("the reference does not converge")


@pytest.mark.parametrize("scale", [1, 6, 10, 30, 60])
def test_sinkhorn_chooses_finally_at_any_logits(scale):
    """Megatron-LM#716: the factors of unwanted experts wander for ever in the last digits of fp32, or overflow."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(256, 8, generator=generator) * 0.3 * scale
    logits += torch.randn(8, generator=generator) * scale * 0.5
    found = log_sinkhorn(logits)
    wanted = equal_shares(logits)
    assert torch.equal(found.topk(2, dim=1).indices, wanted.topk(2, dim=1).indices)
    torch.testing.assert_close(sinkhorn(logits).sum(0), torch.full((8,), 1 / 8), rtol=1e-3, atol=0)


@pytest.mark.parametrize("offset", [93.0, -93.0, 1e4])
def test_sinkhorn_does_not_depend_on_a_number_that_all_logits_have(offset):
    """Megatron-LM#716: exp of a logit of 93 is infinite in fp32."""
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)) * 4
    assert torch.equal(sinkhorn(logits + offset).argmax(1), sinkhorn((logits + offset) - offset).argmax(1))


def test_sinkhorn_ends_when_no_equal_shares_exist():
    """Megatron-LM#716: factors that grow with each round must not keep a step from ending."""
    logits = torch.zeros(3, 3)
    logits[:, 0] = 1e5
    logits[0, 1] = -1e5
    assert log_sinkhorn(logits).isfinite().all()
