"""Cross entropy of logits whose vocabulary is split over tensor ranks, in fp32 whatever the logits' dtype.

Legend: R rows (B x S), V vocabulary here. Neither the softmax nor an fp32 copy of the logits is kept: the forward saves
one number per row, the backward computes the softmax again, both in chunks of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from neox.parallel.grid import ParallelGrid

_CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**27}
"""fp32 numbers of a temporary: what stays in a CPU core's cache, what fills a GPU."""


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, grid: ParallelGrid) -> Tensor:
    """Return -log softmax(logits)[label] per token: logits [B, S, V/tp], labels [B, S] -> [B, S] in fp32.

    Equal on all tensor ranks. labels are ids of the whole vocabulary. The gradient has the logits' dtype.
    """
    losses = _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), grid)
    return losses.view(labels.shape)


def _chunks(logits: Tensor) -> int:
    """Rows of one chunk."""
    return max(1, _CHUNK_ELEMENTS.get(logits.device.type, 2**27) // logits.shape[-1])


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, grid: ParallelGrid) -> Tensor:
        first = grid.tp_rank * logits.shape[-1]
        local = labels - first
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(elsewhere, 0)
        rows = _chunks(logits)
        log_sums = torch.cat([chunk.float().logsumexp(-1) for chunk in logits.split(rows)])
        picked = logits.gather(1, local.unsqueeze(1)).squeeze(1).float()
        if grid.tp_size > 1:
            picked = picked.masked_fill(elsewhere, 0.0)
            dist.all_reduce(picked, group=grid.tp_group)
            gathered = torch.empty(grid.tp_size, *log_sums.shape, device=log_sums.device)
            dist.all_gather(list(gathered.unbind(0)), log_sums, group=grid.tp_group)
            log_sums = gathered.logsumexp(0)
        ctx.save_for_backward(logits, log_sums, local, elsewhere)
        return log_sums - picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, log_sums, local, elsewhere = ctx.saved_tensors
        result = torch.empty_like(logits)
        for part, chunk, log_sum, scale, label, off in zip(
            *(tensor.split(_chunks(logits)) for tensor in (result, logits, log_sums, grad, local, elsewhere)),
            strict=True,
        ):
            softmax = (chunk.float() - log_sum.unsqueeze(1)).exp_()
            # One less at the label, where this rank holds it.
            softmax.scatter_add_(1, label.unsqueeze(1), off.float().sub_(1.0).unsqueeze(1))
            torch.mul(softmax, scale.unsqueeze(1), out=softmax)
            part.copy_(softmax)
        return result, None, None
