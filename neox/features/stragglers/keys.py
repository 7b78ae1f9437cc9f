"""Keys of the comparison of hosts."""

from __future__ import annotations

from neox.config.sections.base import Section
from neox.config.sections.numbers import NonNegativeInt


class StragglerKeys(Section):
    """Keys of the comparison of hosts."""

    straggler_steps: NonNegativeInt = 50
    """Number of steps after which hosts are compared: one whose ranks compute 10 % longer than the median host's is
    named in the log, and in the metrics as `runtime/slow_host/NAME`. 0 compares none."""
