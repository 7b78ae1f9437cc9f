"""The language-model loss."""

from __future__ import annotations

from torch import Tensor

from neox.parallel import ParallelGrid, vocab_parallel_cross_entropy


def lm_loss(logits: Tensor, targets: tuple[Tensor, Tensor], grid: ParallelGrid) -> Tensor:
    """Return the mean cross entropy of unmasked tokens in fp32, equal on all tensor ranks.

    logits: [B, S, V/tp]; targets: (labels [B, S], loss_mask [B, S]). A batch whose mask is all zero gives 0.
    """
    labels, mask = targets
    losses = vocab_parallel_cross_entropy(logits, labels, grid)
    mask = mask.float()
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)
