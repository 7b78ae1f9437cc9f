"""`async_save`: a checkpoint is copied to CPU memory, and written, hashed and committed while training goes on."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from neox.engine.engine import Engine
from neox.engine.file_writer import FileWriter
from neox.engine.saving import commit_files, stage_files
from neox.errors import CheckpointError


@dataclass(frozen=True)
class SaveReport:
    """A committed checkpoint. stall: seconds that training stood still for it; seconds: until it was committed."""

    path: Path
    iteration: int
    stall: float
    seconds: float

    def scalars(self) -> dict[str, float]:
        """The numbers under the names they have in metrics."""
        return {"runtime/save_stall": self.stall, "runtime/save_seconds": self.seconds}


class BackgroundSaves:
    """Saves of one engine, at most one under way. All ranks call `start` and `wait` together.

    The writing thread agrees with those of other ranks over a group of its own: its collectives never meet
    training's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=2))
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._reports: list[SaveReport] = []

    @property
    def failed(self) -> bool:
        """Whether the save under way has failed on this rank; `wait` then raises on every rank."""
        return self._failure is not None

    def start(self, save: str | Path) -> None:
        """Copy the engine's state and return; the rest goes on in a thread. Waits for the save before.

        Raises CheckpointError when that one failed, or the directory cannot be written.
        """
        started = time.perf_counter()
        self.wait()
        engine = self._engine
        writer = FileWriter(not engine.plan.config.checkpoint.no_save_optim, later=True)
        iteration = engine.iteration
        staged = stage_files(engine, save, writer)
        stall = time.perf_counter() - started

        def finish() -> None:
            try:
                path = commit_files(engine.plan, engine.grid, writer, staged, self._group)
                self._reports.append(SaveReport(path, iteration, stall, time.perf_counter() - started))
            except BaseException as error:
                self._failure = error

        # Not a daemon: a run that ends by an error of its own still finishes the checkpoint it has begun.
        self._thread = threading.Thread(target=finish, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is under way. Raises CheckpointError when the last save failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (failure := self._failure) is not None:
            self._failure = None
            if isinstance(failure, CheckpointError):
                raise failure
            raise CheckpointError(f"saving in the background failed: {failure}") from failure

    def take_reports(self) -> list[SaveReport]:
        """What has been committed since the last call."""
        reports, self._reports = self._reports, []
        return reports
