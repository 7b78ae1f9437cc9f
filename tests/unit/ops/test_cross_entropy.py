"""Scores and gradients of rows of logits: torch's operations by autograd, the kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from neox.ops import label_scores, logits_gradient


def test_labels_of_other_ranks_score_zero_and_change_no_gradient():
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels, weights = torch.tensor([0, 5, -1, 6]), torch.tensor([1.0, 0.5, 2.0, 1.0])
    log_sums, picked = label_scores(logits, labels)
    assert picked.tolist() == [logits[0, 0].item(), logits[1, 5].item(), 0.0, 0.0]
    ((log_sums - picked) * weights).sum().backward()
    grad = logits_gradient(logits.detach().clone(), log_sums.detach(), labels, weights, weights)
    torch.testing.assert_close(grad, logits.grad)


# Run apart: TRITON_INTERPRET must be set before triton is imported, and would change it for every later test.
INTERPRETED = """
import torch
from neox.ops import label_scores, logits_gradient, triton_cross_entropy
from neox.ops.triton_cross_entropy import fused_label_scores, fused_logits_gradient

bounds = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
for dtype, atol in bounds.items():
    for columns, block in ((1, 8192), (100, 8192), (100, 32)):
        triton_cross_entropy._BLOCK = block
        generator = torch.Generator().manual_seed(columns)
        logits = (torch.randn(7, columns, generator=generator) * 4).to(dtype)
        labels = torch.randint(-columns, 2 * columns, (7,), generator=generator)
        weights = torch.rand(7, generator=generator)
        log_sums, picked = label_scores(logits, labels)
        fused_sums, fused_picked = fused_label_scores(logits, labels)
        torch.testing.assert_close(fused_sums, log_sums, atol=1e-6, rtol=1e-6)
        assert torch.equal(fused_picked, picked)
        softmax_weights = weights + torch.rand(7, generator=generator)
        grad = logits_gradient(logits.clone(), log_sums, labels, weights, softmax_weights)
        place = logits.clone()
        fused = fused_logits_gradient(place, log_sums, labels, weights, softmax_weights)
        assert fused.data_ptr() == place.data_ptr() and fused.dtype == dtype
        torch.testing.assert_close(fused, grad, atol=atol, rtol=atol)
print("agreed")
"""


def test_kernels_agree_with_torch_in_the_interpreter():
    triton = pytest.importorskip("triton", reason="triton is not installed")
    versions = [tuple(map(int, module.__version__.split(".")[:2])) for module in (triton, np)]
    if versions[0] < (3, 7) and versions[1] >= (2, 4):
        pytest.skip(
            "the interpreter of triton before 3.7 (torch 2.11) makes numbers of arrays, which numpy 2.4 refuses"
        )
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "agreed"
