"""Head and cross entropy in one operation that never holds the logits of more than a chunk of tokens.

The forward pass computes each chunk's logits, its loss, and at once its gradients, so that nothing is computed twice
and what is kept has the size of the hidden states and the weight (the idea: Liger-Kernel, arXiv:2410.10989).

Legend: R tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.ops.linear import linear

CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}
"""Logits held at once: what stays near a CPU core, what keeps a GPU busy."""


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor) -> Tensor:
    """Return sum over tokens of token_weight x -log softmax(x W^T)[label], fp32: x [R, H], weight [V, H], [R], [R].

    Products are in x's dtype, the softmax and all sums in fp32, gradients in the dtypes of x and weight. Equal to
    `linear_cross_entropy_reference` up to rounding. token_weights get no gradient.
    """
    if not torch.is_grad_enabled():  # which a Function cannot see: it would compute gradients for nobody
        x, weight = x.detach(), weight.detach()
    return _LinearCrossEntropy.apply(x, weight, labels, token_weights)


def linear_cross_entropy_reference(x: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor) -> Tensor:
    """The same in plain words, with all logits at once."""
    losses = F.cross_entropy(F.linear(x, weight).float(), labels, reduction="none")
    return (losses * token_weights).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        rows = max(1, CHUNK_ELEMENTS.get(x.device.type, 2**27) // weight.shape[0])
        grad_x = torch.empty_like(x) if need_x else None
        # fp32: a sum of many chunks' contributions would lose bits in bf16.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        # Weights of a mean are tiny, and a loss scale comes only in the backward pass: in fp16 the gradients of single
        # logits would vanish. So the largest weight is 1 in here, and what it was is multiplied in later.
        largest = token_weights.float().abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        token_weights = token_weights.float() / largest
        for first in range(0, x.shape[0], rows):
            part = slice(first, first + rows)
            loss, grad = _chunk(linear(x[part], weight), labels[part], token_weights[part])
            total += loss
            if grad_x is not None:
                grad_x[part] = linear(grad, weight.t())
            if grad_weight is not None:
                grad_weight += linear(grad.t(), x[part].t())
        ctx.save_for_backward(grad_x, grad_weight, largest)
        ctx.weight_dtype = weight.dtype
        return total * largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_x, grad_weight, largest = ctx.saved_tensors
        scale = grad * largest
        grad_x = None if grad_x is None else grad_x * scale
        grad_weight = None if grad_weight is None else (grad_weight * scale).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None


def _chunk(logits: Tensor, labels: Tensor, token_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of some tokens and its gradient by their logits, in the logits' dtype."""
    scores = logits.float()
    log_sums = scores.logsumexp(-1)
    column = labels.unsqueeze(1)
    loss = ((log_sums - scores.gather(1, column).squeeze(1)) * token_weights).sum()
    grad = (scores - log_sums.unsqueeze(1)).exp_().mul_(token_weights.unsqueeze(1))
    grad.scatter_add_(1, column, -token_weights.unsqueeze(1))
    return loss, grad.to(logits.dtype)
