"""Background saves (`async_save`): state is copied to CPU memory, written and committed while training goes on."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from neox.engine.engine import Engine
from neox.engine.saving import FileWriter, commit_files, stage_files
from neox.errors import CheckpointError


@dataclass(frozen=True)
class SaveReport:
    """A committed checkpoint.

    Attributes:
        path: Directory of the checkpoint.
        iteration: Completed steps.
        stall: Seconds for which training waited.
        seconds: Seconds from the start of the save until it was committed.
    """

    path: Path
    iteration: int
    stall: float
    seconds: float

    def scalars(self) -> dict[str, float]:
        """Return the durations under their names in metrics."""
        return {"runtime/save_stall": self.stall, "runtime/save_seconds": self.seconds}


class BackgroundSaves:
    """Saves of one engine, at most one at a time; all ranks call `start` and `wait` together.

    The writing threads of all ranks communicate over a process group of their own, apart from training's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=2))
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._reports: list[SaveReport] = []

    @property
    def failed(self) -> bool:
        """Whether the current save has failed on this rank; `wait` then raises on every rank."""
        return self._failure is not None

    def start(self, save: str | Path) -> None:
        """Copy the engine's state, and write it in a thread; waits for the previous save first.

        Raises:
            CheckpointError: If the previous save failed, or the directory cannot be written.
        """
        started = time.perf_counter()
        self.wait()
        engine = self._engine
        writer = FileWriter(engine, deferred=True)
        iteration = engine.iteration
        staged = stage_files(engine, save, writer)
        engine.hold_next_update(writer.copies)
        stall = time.perf_counter() - started

        def finish() -> None:
            try:
                path = commit_files(engine.plan, engine.grid, writer, staged, self._group)
                self._reports.append(SaveReport(path, iteration, stall, time.perf_counter() - started))
            except BaseException as error:
                self._failure = error

        # Not a daemon thread: a run that ends with an error still completes the checkpoint that it has begun.
        self._thread = threading.Thread(target=finish, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the current save, if any. Raises CheckpointError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (failure := self._failure) is not None:
            self._failure = None
            if isinstance(failure, CheckpointError):
                raise failure
            raise CheckpointError(f"saving in the background failed: {failure}") from failure

    def take_reports(self) -> list[SaveReport]:
        """Return the checkpoints committed since the last call."""
        reports, self._reports = self._reports, []
        return reports
