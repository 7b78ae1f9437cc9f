"""Keys of the profiler."""

from __future__ import annotations

from typing import Annotated, Literal

from neox.config.sections.base import Section
from neox.config.sections.conditions import OnlyWith, OnlyWithAny, Requires
from neox.config.sections.numbers import NonNegativeInt, PositiveInt


class ProfilerKeys(Section):
    """Keys of the profiler."""

    profile: Annotated[bool, Requires("log_dir", advice="give the directory for the files")] = False
    """Profile some steps of every rank with torch's profiler: a trace for Chrome and a table by operation, in
    `log_dir`/profile."""

    profile_backend: Annotated[Literal["pytorch"], OnlyWith("profile")] = "pytorch"
    """The profiler."""

    profile_step_start: Annotated[NonNegativeInt, OnlyWithAny(("profile", "memory_profiling"))] = 10
    """First step that is profiled; steps count from 0."""

    profile_step_stop: Annotated[PositiveInt, OnlyWithAny(("profile", "memory_profiling"))] = 12
    """Step before which profiling ends."""

    memory_profiling: bool = False
    """Record which operations allocate memory in the profiled steps; on a GPU, also write a snapshot for
    pytorch.org/memory_viz."""

    memory_profiling_path: Annotated[str | None, OnlyWith("memory_profiling")] = None
    """Directory for the tables and snapshots of memory, by default `log_dir`/profile."""
