"""Keys of the average of the trained weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from neox.config.sections.base import Section
from neox.config.sections.conditions import OnlyWith
from neox.config.sections.numbers import PositiveInt


class AverageKeys(Section):
    """Keys of the average of the trained weights."""

    ema_decay: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Keep an exponential moving average of the trained weights, in fp32: after each step average = d * average + (1 -
    d) * weights. At step n of the average d is the smaller of this number and (1 + n) / (10 + n), so that the first
    weights do not stay in it. A step that fp16 skips counts as well. Data ranks divide it if they divide the
    optimizer's states. Checkpoints hold it, a run resumes it at any degrees, and `load_weights: ema` and
    `tools/convert_to_hf.py --weights ema` read it."""

    ema_every: Annotated[PositiveInt, OnlyWith("ema_decay")] = 1
    """Number of steps between updates of the average, each of which uses d to the power of this number. Together with
    ema_device it saves time."""

    ema_device: Annotated[Literal["optimizer", "cpu"], OnlyWith("ema_decay")] = "optimizer"
    """Memory that holds the average. `optimizer`: that of the optimizer's fp32 weights. `cpu`: main memory, to which
    the weights are copied for each update."""

    eval_ema: Annotated[bool, OnlyWith("ema_decay")] = False
    """Evaluate the average, too, on the same batches, as `validation_ema/lm_loss` and so on."""

    def ema_factor(self, step: int) -> float:
        """Return the factor of the average in its update at a step, from 1."""
        assert self.ema_decay is not None
        decay = min(self.ema_decay, (1 + step) / (10 + step))
        return float(decay**self.ema_every)
