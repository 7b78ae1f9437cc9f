"""Key of the numbers by layer that show where a training becomes unstable."""

from __future__ import annotations

from typing import Annotated

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes
from neox.config.sections.numbers import PositiveInt


class StabilityKeys(Section):
    """Key of the numbers by layer that show where a training becomes unstable."""

    log_stability_every: Annotated[
        PositiveInt | None,
        Excludes("context_parallel_size", above=1, reason="a rank sees the keys of its own tokens only"),
        Excludes("expert_model_parallel_size", above=1, reason="data ranks hold different experts"),
    ] = None
    """Number of steps between reports of where a training becomes unstable. Each layer reports
    `stability/attention_logit/LAYER` (the largest scaled product of a query and a key, before any mask but the causal
    one), `activation_rms` (of a block's output), `gradient_norm` (before clipping), `weight_norm` and `update_norm` (of
    its trained parameters). LAYER is its number in a checkpoint's file names. Logits and activations are those of the
    first micro batch of the step. With log_dir, stability.png shows the curves. A rank keeps a copy of the fp32 weights
    that it updates."""
