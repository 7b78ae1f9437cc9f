"""Background saves (`async_save`): state is copied to CPU memory, then written and published during the next steps.

    training   step | stage_checkpoint: copies are queued | passes of the next step | hold | update | ...
    GPU             |        copies to pinned CPU memory on a stream of their own   |      | update | ...
    thread          |  finish: waits for the copies, writes the files               ; publish_checkpoint

`hold` stands before whatever overwrites the copied tensors: the GPU runs the update after the copies, and the host goes
on. The order of one save is in `saving`.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from neox.checkpoint import layer_file, save_file
from neox.engine.checkpoints.saving import CheckpointFiles, publish_checkpoint, stage_checkpoint
from neox.engine.engine import Engine
from neox.engine.reports import SaveReport
from neox.errors import CheckpointError
from neox.log import get_logger

_log = get_logger(__name__)


class HostCopies:
    """Copies of tensors in CPU memory. Tensors of an accelerator go to pinned memory by a stream of their own.

    The accelerator runs the forward and backward pass meanwhile. Code that overwrites the tensors calls `hold`
    first, and code that reads the copies calls `wait`. torch keeps pinned memory for the next copies, and rounds
    sizes up to powers of two unless PYTORCH_ALLOC_CONF holds `pinned_max_round_threshold_mb`.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._pinned = True

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy, whose content is there after `wait`."""
        tensor = tensor.detach()
        host = self._pinned_like(tensor) if tensor.device.type != "cpu" else None
        if host is None:
            return tensor.to("cpu", copy=True)
        accelerator = get_accelerator()
        if tensor.device not in self._streams:
            self._streams[tensor.device] = accelerator.Stream(tensor.device)
        stream = self._streams[tensor.device]
        stream.wait_stream(accelerator.current_stream(tensor.device))
        with accelerator.stream(stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # memory of a tensor that is gathered for the copy is not used again before
        return host

    def hold(self) -> None:
        """Let the accelerator finish the copies before any work that is queued from now on; the host does not wait."""
        for device, stream in self._streams.items():
            get_accelerator().current_stream(device).wait_stream(stream)

    def wait(self) -> None:
        """Wait until the content of all copies is there."""
        for stream in self._streams.values():
            stream.synchronize()

    def _pinned_like(self, tensor: Tensor) -> Tensor | None:
        """Return pinned memory; None if the system gives none. The copy then makes the host wait."""
        if not self._pinned:
            return None
        try:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        except RuntimeError as error:
            self._pinned = False
            _log.warning("async_save: no more pinned memory (%s); training waits for the rest of the copies", error)
            return None


def snapshot(value: Any, copies: HostCopies, seen: dict[int, Tensor] | None = None) -> Any:
    """Copy a state dict into CPU memory; a tensor that occurs twice is copied once.

    Args:
        value: Tensors and plain values in dictionaries, lists and tuples.
        copies: Makes the copies of tensors.
        seen: Copies made so far, by id of the tensor.
    """
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = copies.copy(value)
        return seen[id(value)]
    if type(value) in (list, tuple):
        return type(value)(snapshot(item, copies, seen) for item in value)
    if type(value) is dict:
        return {key: snapshot(item, copies, seen) for key, item in value.items()}
    if isinstance(value, Mapping):  # OrderedDict and similar types stay what they are
        copied: Any = copy.copy(value)
        for key, item in value.items():
            copied[key] = snapshot(item, copies, seen)
        return copied
    return copy.deepcopy(value)


class QueuedFiles(CheckpointFiles):
    """Keeps copies of the files' content in CPU memory, and writes them in `finish`.

    Attributes:
        copies: The copies of tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies = HostCopies()
        self._queue: list[tuple[Path, Any]] = []

    def put(self, path: Path, value: Any) -> None:
        """Queue a copy of a file's content."""
        self._queue.append((path, snapshot(value, self.copies)))

    def put_layer(self, directory: Path, index: int, state: Mapping[str, Tensor], *, tp_rank: int) -> None:
        """Queue a copy of a layer file's content."""
        self.put(directory / layer_file(index, tp_rank), dict(state))

    def finish(self) -> None:
        """Write what is queued, and release each copy once it is on disk."""
        self.copies.wait()
        while self._queue:
            path, value = self._queue.pop(0)
            save_file(path, value)


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
        files = QueuedFiles()
        iteration = engine.iteration
        staged = stage_checkpoint(engine, save, files)
        engine.before_next_overwrite(files.copies.hold)
        stall = time.perf_counter() - started

        def finish() -> None:
            try:
                path = publish_checkpoint(engine.plan, engine.grid, files, staged, self._group)
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
        failure = self._failure
        if failure is not None:
            self._failure = None
            if isinstance(failure, CheckpointError):
                raise failure
            raise CheckpointError(f"saving in the background failed: {failure}") from failure

    def take_reports(self) -> list[SaveReport]:
        """Return the checkpoints committed since the last call."""
        reports = self._reports
        self._reports = []
        return reports
