"""Degrees of parallelism from the number of ranks."""

from __future__ import annotations

from neox.config.plan import Topology
from neox.config.sections import NeoXConfig
from neox.config.wording import said


def solve_grid(config: NeoXConfig, world: int, problems: list[str]) -> Topology | None:
    """Return pp, mp and dp = world / (pp x mp); a world that cannot be divided goes to `problems`."""
    asked, mp = config.parallelism.pipe_parallel_size, config.parallelism.model_parallel_size
    pp = max(1, asked)  # NeoX's 0 and 1 both mean one stage
    copy = pp * mp
    if world < 1 or world % copy:
        near = sorted({n for n in (world // copy * copy, -(-world // copy) * copy) if n > 0} or {copy})
        degrees = f"{said(config, 'pipe_parallel_size', asked)} x {said(config, 'model_parallel_size', mp)}"
        problems.append(
            f"{world} GPUs cannot be divided into copies of the model on {copy}: {degrees}; "
            f"use {' or '.join(map(str, near))} GPUs, or other degrees"
        )
        return None
    return Topology(pp_size=pp, dp_size=world // copy, tp_size=mp)
