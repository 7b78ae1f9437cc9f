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
    """Number of steps between reports of statistics of each layer that show where a training becomes unstable:
    `stability/attention_logit/LAYER` (largest scaled product of a query and a key, before other masks than the causal
    one), `activation_rms` (of a block's output), and the norms `gradient_norm` (before clipping), `weight_norm` and
    `update_norm` of its trained parameters. Layers have the numbers of a checkpoint's files. What happens in the passes
    is observed in the first micro batch. With log_dir, stability.png shows them. The update needs a copy of the fp32
    weights that a rank updates."""
