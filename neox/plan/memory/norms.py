"""Memory of norms."""

from __future__ import annotations

from neox.architecture import NORMS
from neox.plan.layout import Workload

_FP32 = 4


def fp32_of_norm(run: Workload) -> int:
    """Return the bytes for one element by which two fp32 tensors, if a norm keeps these, exceed its input; else 0."""
    norm = NORMS[run.network.norm]
    if norm.by_steps or (norm.by_steps_on_cpu and run.on_cpu):
        return 2 * _FP32 - run.bytes_per_number
    return 0
