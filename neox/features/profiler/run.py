"""Profiler of some training steps: a trace for Chrome, a table by operation, and allocated memory."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import torch
from torch.profiler import ProfilerActivity, profile

from neox.engine import Feature, StepReport, TrainState
from neox.engine.device import device_kind, synchronize
from neox.files import write_text
from neox.log import get_logger
from neox.plan import RunPlan

_log = get_logger(__name__)
_ROWS = 60
_ACTIVITIES = MappingProxyType({"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU})  # by kind of device
_EVENTS = 100_000  # allocations that a snapshot of a GPU's memory remembers


def build(plan: RunPlan, rank: int) -> Profiler | None:
    """Return the profiler; None if nothing is profiled."""
    keys = plan.config.logging
    if not keys.profile and not keys.memory_profiling:
        return None
    return Profiler(plan, rank)


class Profiler(Feature):
    """Profiler of the steps from `profile_step_start` to before `profile_step_stop`; on every rank.

    Steps are counted from 0 over all resumes. It writes `profile/rank_NNNN.json` (Chrome's trace) and `.txt` (a table)
    in `log_dir`; with `memory_profiling` a snapshot of the GPU's memory (`.pickle`, for pytorch.org/memory_viz), or on
    a CPU a table by allocated memory (`_memory.txt`).

    Args:
        plan: Plan of the run.
        rank: Number of this rank.
    """

    def __init__(self, plan: RunPlan, rank: int) -> None:
        keys = plan.config.logging
        self.steps = range(keys.profile_step_start, keys.profile_step_stop)
        self.operations = keys.profile
        self.memory = keys.memory_profiling
        self._directory = Path(keys.log_dir or ".", "profile")
        self._memory_directory = Path(keys.memory_profiling_path or self._directory)
        self._name = f"rank_{rank:04d}"
        self._rank = rank
        self._device = device_kind()
        self._profile: profile | None = None
        self._done = False

    def on_start(self, state: TrainState) -> None:
        """Begin if the first step is to be profiled; say so if a resume is past all of them."""
        if state.iteration >= self.steps.stop and self._rank == 0:
            _log.warning("steps %d to %d are done: nothing is profiled", self.steps.start, self.steps.stop - 1)
        self._after(state.iteration)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Begin or end after a step."""
        self._after(state.iteration)

    def on_end(self, state: TrainState) -> None:
        """Write what was profiled of a run that ends earlier."""
        self._finish()

    def on_failure(self, state: TrainState) -> None:
        """Write what was profiled before the error."""
        self._finish()

    def _after(self, iteration: int) -> None:
        if self._profile is not None and iteration >= self.steps.stop:
            self._finish()
        elif self._profile is None and not self._done and iteration in self.steps:
            self._begin()

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        activity = _ACTIVITIES.get(self._device)
        if activity is not None:
            activities.append(activity)
        elif self._device != "cpu" and self._rank == 0:
            _log.warning("torch's profiler does not see kernels of %s: only the host is profiled", self._device)
        if self.memory and self._device == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=_EVENTS)
        self._profile = profile(activities=activities, profile_memory=self.memory)
        self._profile.start()

    def _finish(self) -> None:
        """Write the files, once."""
        self._done = True
        found = self._profile
        if found is None:
            return
        self._profile = None
        synchronize()
        found.stop()
        device = self._device if self._device in _ACTIVITIES else "cpu"
        if self.operations:
            self._directory.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(self._directory / f"{self._name}.json"))
            table = found.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=_ROWS)
            write_text(self._directory / f"{self._name}.txt", table)
        if self.memory:
            self._memory_directory.mkdir(parents=True, exist_ok=True)
            path = self._memory_directory / f"{self._name}_memory.txt"
            write_text(path, found.key_averages().table(sort_by=f"self_{device}_memory_usage", row_limit=_ROWS))
            if self._device == "cuda":
                torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
                torch.cuda.memory._record_memory_history(enabled=None)
        if self._rank == 0:
            directories = []
            if self.operations:
                directories.append(str(self._directory))
            if self.memory:
                directories.append(str(self._memory_directory))
            _log.info("profiled steps of every rank are in %s", " and ".join(dict.fromkeys(directories)))
