"""Keys of the gradient noise scale."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith


class NoiseScaleKeys(Section):
    """Keys of the gradient noise scale."""

    log_gradient_noise_scale: Annotated[
        bool,
        Excludes(
            "zero_optimization.stage",
            (1, 2, 3),
            reason="gradients are divided over ranks before they can be compared",
            advice="use stage 0, or remove it",
        ),
        Excludes("rampup_batch_size", reason="it compares batches of one size"),
    ] = False
    """Report the gradient noise scale (arXiv:1812.06162) as `train/noise_scale` in the metrics: the batch size in
    samples above which larger batches help little. With pipeline stages it needs fp32 or fp16."""

    gradient_noise_scale_n_batches: Annotated[int, OnlyWith("log_gradient_noise_scale")] = Field(5, ge=2)
    """Number of successive steps whose mean gradient counts as the large batch; a single step is the small one."""

    gradient_noise_scale_cpu_offload: Annotated[bool, OnlyWith("log_gradient_noise_scale")] = False
    """Keep the sum of these gradients in CPU memory; it is as large as the gradients of a rank."""
