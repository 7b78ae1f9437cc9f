"""Muon for hidden matrices, AdamW for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neox.optim.adamw import AdamW
from neox.optim.clipping import NormScope, WithoutDynamo, without_dynamo

_torch_step = without_dynamo(torch.optim.Muon.step)


class _HiddenMuon(WithoutDynamo, torch.optim.Muon):
    """torch's Muon."""


class Muon(AdamW):
    """torch's Muon (arXiv:2502.16982) for groups marked `hidden`, AdamW for embeddings, head, norms and biases.

    Args:
        groups: As in `ClippedOptimizer`, like `max_norm` and `scope`.
        max_norm: See there.
        scope: See there.
        lr: Learning rate of both.
        betas: AdamW's.
        eps: AdamW's.
        hidden: Arguments of `torch.optim.Muon`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        max_norm: float = 0.0,
        scope: NormScope | None = None,
        lr: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **hidden: Any,
    ) -> None:
        of_muon = [group for group in groups if group.get("hidden")]
        # First: it fills the same dictionaries, which AdamW's numbers then do not replace.
        self._muon = _HiddenMuon(of_muon, lr=lr, **hidden) if of_muon else None
        super().__init__(groups, max_norm=max_norm, scope=scope, lr=lr, betas=betas, eps=eps)

    def update(self, divisor: Tensor | None) -> None:
        """Update all parameters."""
        self.divide_gradients(divisor)
        for group in self.param_groups:
            if not group.get("hidden"):
                self._update_fused(group, None)
        if self._muon is not None:  # loading a state replaces groups and states
            self._muon.param_groups = [group for group in self.param_groups if group.get("hidden")]
            self._muon.state = self.state
            _torch_step(self._muon)
            for p in (p for group in self._muon.param_groups for p in group["params"] if p.grad is not None):
                # Not used here, but torch's AdamW expects a counter in every state that it loads.
                self.state[p]["step"] = self.state[p].get("step", torch.zeros(())) + 1
