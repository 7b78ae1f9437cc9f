"""Cross entropy by rows of logits: scores and their gradient, each as torch operations and as a kernel.

On a GPU each is one Triton kernel, which reads (and overwrites) half-precision logits without a copy in fp32. If the
vocabulary is split over tensor ranks, `neox.model` joins their results.

Legend: R tokens, V vocabulary here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from neox.ops.fast_paths import has_fast_path

CPU_ELEMENTS = 2**19
"""fp32 numbers of a temporary on a CPU, which stay in a core's cache."""


def label_scores(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log sum exp of each row, and the score of its label, in fp32: logits [R, V] -> [R], [R].

    Args:
        logits: Logits of any dtype.
        labels: Columns [R]; those outside 0..V-1 are on other ranks, and their score is 0.
    """
    if _fused(logits):
        from neox.ops.triton_cross_entropy import fused_label_scores

        return fused_label_scores(logits, labels)
    rows = len(logits)
    if logits.device.type == "cpu":
        rows = CPU_ELEMENTS // logits.shape[-1]
    log_sums = torch.cat([part.float().logsumexp(-1) for part in logits.split(max(1, rows))])
    column, elsewhere = _own_columns(logits, labels)
    return log_sums, logits.gather(1, column).float().masked_fill_(elsewhere, 0.0).squeeze(1)


def logits_gradient(
    logits: Tensor, log_sums: Tensor, labels: Tensor, weights: Tensor, softmax_weights: Tensor
) -> Tensor:
    """Return softmax_weight x softmax - weight x [column is the label], in the logits' dtype and place: [R, V].

    This is the gradient of weight x cross entropy if both weights are equal.

    Args:
        logits: Logits, which are overwritten.
        log_sums: Log sum exp of whole rows over all ranks, [R] in fp32.
        labels: Labels as `label_scores` takes them.
        weights: Weights of the rows, [R] in fp32.
        softmax_weights: Factors of the rows' softmax, [R] in fp32; larger with a z-loss.
    """
    if _fused(logits):
        from neox.ops.triton_cross_entropy import fused_logits_gradient

        return fused_logits_gradient(logits, log_sums, labels, weights, softmax_weights)
    column, elsewhere = _own_columns(logits, labels)
    scores = logits.float()  # the logits themselves in fp32
    scores.sub_(log_sums.unsqueeze(1)).exp_().mul_(softmax_weights.unsqueeze(1))
    scores.scatter_add_(1, column, -weights.unsqueeze(1).masked_fill(elsewhere, 0.0))
    return scores.to(logits.dtype)


def _own_columns(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels' columns [R, 1], and whether they are on another rank [R, 1], where the column is 0."""
    elsewhere = ((labels < 0) | (labels >= logits.shape[-1])).unsqueeze(1)
    return labels.unsqueeze(1).masked_fill(elsewhere, 0), elsewhere


def _fused(logits: Tensor) -> bool:
    """Return whether Triton's kernels serve the logits. Torch's operations give the same numbers."""
    return has_fast_path("triton", logits.device)
