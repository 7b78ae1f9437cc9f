"""Keys of the comparison of hosts."""

from __future__ import annotations

from pydantic import Field

from neox.config.sections.base import Section


class StragglerKeys(Section):
    """Keys of the comparison of hosts."""

    straggler_steps: int = Field(50, ge=0)
    """Number of steps after which hosts are compared: one whose ranks compute 10 % longer than the median host's is
    named in the log, and in the metrics as `runtime/slow_host/NAME`. 0 compares none."""
