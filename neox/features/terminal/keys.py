"""Keys of the lines on the terminal."""

from __future__ import annotations

from typing import Literal

from neox.config.sections.base import Section
from neox.config.sections.numbers import PositiveInt


class TerminalKeys(Section):
    """Keys of the lines on the terminal."""

    log_interval: PositiveInt = 100
    """Number of iterations between lines on the terminal (the default is that of newer gpt-neox; v2.0 had none). If
    this key is not given, a run of fewer than 2,000 iterations prints about twenty lines."""

    log_style: Literal["neox", "fleetx", "oneflow"] = "neox"
    """Form of these lines: gpt-neox's, FleetX's (`global step N, epoch: ...`) or OneFlow's table (throughput in
    samples/s, latency in seconds)."""

    log_grad_norm: bool = False
    """Report the gradient norm."""
