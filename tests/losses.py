"""The loss of a model on one batch, as engines compute it."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from neox.model import GPT
from neox.objectives import CausalLM


def causal_lm_loss(model: GPT, tokens: Tensor, labels: Tensor, mask: Tensor, **inputs: Tensor) -> Tensor:
    return model(tokens, loss=partial(CausalLM(model.grid).loss, targets=(labels, mask)), **inputs)
