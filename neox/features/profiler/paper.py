"""The profiler on paper."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.feature import FeaturePaper
from neox.problems import Problem


def problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield steps that cannot be profiled, and files without a directory."""
    keys = config.logging
    if not (keys.profile or keys.memory_profiling):
        return
    if keys.profile_step_start >= keys.profile_step_stop:
        stop = config.describe_setting("profile_step_stop")
        rule = f"is not below {stop}, before which profiling ends"
        yield config.problem("profile_step_start", rule, "profile_step_stop")
    if keys.memory_profiling and keys.memory_profiling_path is None and keys.log_dir is None:
        rule = "needs log_dir or memory_profiling_path; give a directory for the files"
        yield config.problem("memory_profiling", rule, "log_dir", "memory_profiling_path")


PAPER = FeaturePaper(problems=problems, off=("profile=false", "memory_profiling=false"))
