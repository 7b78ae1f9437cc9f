"""The loss of a model on one batch, as engines compute it, and the same in plain words."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from neox.data.masked.masked_batch import MaskedLMBatch
from neox.model import GPT, Context
from neox.objectives import LOSS_NORMALIZATIONS, CausalLM, MaskedLM, Objective, ScoreTable, unpack_rows

MICRO_BATCH = LOSS_NORMALIZATIONS["micro_batch"]


def score_rows(objective: Objective, packed: Tensor) -> dict[str, float | None]:
    """Return the scores of one micro batch by name, from what an objective computes of it."""
    return ScoreTable(objective).finish(unpack_rows(packed).tolist())


def causal_lm_loss(model: GPT, tokens: Tensor, labels: Tensor, mask: Tensor, **inputs: Tensor) -> Tensor:
    return model(
        tokens, Context(**inputs), partial(CausalLM().scores, targets=(labels, MICRO_BATCH.weights(mask.float(), 1.0)))
    )[0]


def cross_entropy_reference(
    x: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Head and cross entropy with all logits at once: what `head_cross_entropy` is compared with."""
    losses = F.cross_entropy(F.linear(x, weight, bias).float(), labels, reduction="none")
    return (losses * token_weights).sum()


def masked_lm_loss(model: GPT, batch: MaskedLMBatch) -> Tensor:
    objective, values = MaskedLM(model.architecture.sentence_head), batch._asdict()
    values["masked_weights"] = MICRO_BATCH.weights(batch.masked_weights, 1.0)
    inputs = objective.inputs(values)
    loss = partial(objective.scores, targets=objective.targets(values))
    return model(inputs.pop("tokens"), Context(**inputs), loss)[0]
