"""Keys of statistics of updates."""

from __future__ import annotations

from typing import Annotated

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes

_NeedsWholeUpdates = Annotated[
    bool,
    Excludes("context_parallel_size", above=1, reason="context ranks hold the same gradients in parts"),
    Excludes("expert_model_parallel_size", above=1, reason="data ranks hold different experts"),
]
"""Type of a flag that observes updates of the optimizer's tensors."""


class UpdateStatisticsKeys(Section):
    """Keys of statistics of updates."""

    log_param_norm: _NeedsWholeUpdates = False
    """Log the norm of all trained weights after each update, as `train/param_norm`."""

    log_grad_pct_zeros: _NeedsWholeUpdates = False
    """Log the percentage of zeros among the elements of all gradients, as `train/grad_pct_zeros`."""

    log_optimizer_states: _NeedsWholeUpdates = False
    """Log the norm of each optimizer state after each update, as `optimizer/exp_avg_norm` and so on. Only states with
    one number per weight are included."""
