"""The loss of a model on one batch, as engines compute it, and the same in plain words."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from neox.data.masked_batch import MaskedLMBatch
from neox.model import GPT, Context
from neox.objectives import CausalLM, MaskedLM


def causal_lm_loss(model: GPT, tokens: Tensor, labels: Tensor, mask: Tensor, **inputs: Tensor) -> Tensor:
    return model(tokens, Context(**inputs), partial(CausalLM().scores, targets=(labels, mask)))[0]


def cross_entropy_reference(
    x: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Head and cross entropy with all logits at once: what `head_cross_entropy` is compared with."""
    losses = F.cross_entropy(F.linear(x, weight, bias).float(), labels, reduction="none")
    return (losses * token_weights).sum()


def masked_lm_loss(model: GPT, batch: MaskedLMBatch) -> Tensor:
    objective, values = MaskedLM(model.architecture.sentence_head), batch._asdict()
    inputs = objective.inputs(values)
    loss = partial(objective.scores, targets=objective.targets(values))
    return model(inputs.pop("tokens"), Context(**inputs), loss)[0]
