"""Multi-token prediction: the loss of modules that predict tokens further ahead (DeepSeek-V3, arXiv:2412.19437, 2.2).

    total loss = loss of the objective + w / D x (L_1 + ... + L_D)

L_k is the cross entropy of the tokens k + 1 ahead, and w is `mtp_loss_scaling_factor`. As in the paper, each L_k is
divided by what the main loss is divided by (T there, the tokens of a sample), although the last k tokens of a sample
have no label that far ahead. So every label weighs as much as in the main loss, whatever `loss_normalization` says.
Megatron-LM divides by the number of labels that are left, which makes the loss T / (T - k) times as large.

    index in the row        0   1   2   3   4   5           tokens a to f; g is only a label
    token                   a   b   c   d   e   f
    label                   b   c   d   e   f   g
    module 1: token         b   c   d   e   f   -
              label         c   d   e   f   g   -
    module 2: token         c   d   e   f   -   -
              label         d   e   f   g   -   -

A label counts if it counts in the main loss, where it is one token ahead, and if the tokens before it up to index i are
of the document of token i.

Legend: B batch, S sequence, D modules.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

TOKENS = "tokens_ahead"
"""Field of a batch: ids of the tokens 1 to D ahead [B, S, D]."""
LABELS = "labels_ahead"
"""Field of a batch: the tokens after them [B, S, D]."""
WEIGHTS = "weights_ahead"
"""Field of a batch: the weights of these labels [B, S, D]."""
DOCUMENTS = "label_documents"
"""Field of a batch: where the document of each token starts, if labels respect it and attention does not [B, S]."""


def with_tokens_ahead(batch: Mapping[str, Tensor], depths: int, weights: str) -> dict[str, Tensor]:
    """Return a batch with the tokens, labels and weights of multi-token prediction.

    It needs whole samples: context ranks divide tokens afterwards.

    Args:
        batch: Micro batch with `tokens`, `labels` and their weights [B, S], and perhaps `document_starts` [B, S].
        depths: Number D of modules.
        weights: Name of the weights.
    """
    extended = dict(batch)
    documents = extended.pop(DOCUMENTS, batch.get("document_starts"))
    tokens = []
    labels = []
    label_weights = []
    for depth in range(1, depths + 1):
        weight = _later(batch[weights], depth)
        if documents is not None:
            weight = weight * (_later(documents, depth) == documents)
        tokens.append(_later(batch["tokens"], depth))
        labels.append(_later(batch["labels"], depth))
        label_weights.append(weight)
    extended[TOKENS] = torch.stack(tokens, dim=-1)
    extended[LABELS] = torch.stack(labels, dim=-1)
    extended[WEIGHTS] = torch.stack(label_weights, dim=-1)
    return extended


def _later(values: Tensor, depth: int) -> Tensor:
    """Return the values [B, S] that stand `depth` later in the row, and 0 behind its end."""
    later = torch.zeros_like(values)
    later[:, : values.shape[1] - depth] = values[:, depth:]
    return later
