"""Background upload of committed checkpoints to a mirror, by a thread of rank 0."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from neox.checkpoint import keep_last, read_manifest
from neox.checkpoint.remote.mirror import SUPERSEDED_MANIFEST, Mirror
from neox.checkpoint.save_directory.staging import kept_from_deletion
from neox.checkpoint_files.finding import newest_checkpoint
from neox.checkpoint_files.names import parse_step_directory, step_directory
from neox.engine import Feature, SaveReport, TrainState
from neox.errors import CheckpointError
from neox.launch import busy_saving, report_progress
from neox.log import get_logger
from neox.plan import RunPlan
from neox.plan.run_start import requested_start

_log = get_logger(__name__)
_POLL_SECONDS = 0.2
_DEADLINE_SECONDS = 300.0


def build(plan: RunPlan, rank: int) -> MirrorUploads | None:
    """Return the uploads, on rank 0; None without `checkpoint_mirror`."""
    if rank != 0 or plan.config.checkpoint.checkpoint_mirror is None:
        return None
    return MirrorUploads(plan)


class MirrorUploads(Feature):
    """Queue of checkpoints that go to `checkpoint_mirror`. After a failure the next checkpoint is tried.

    Only the newest waiting checkpoint is uploaded, and it is not pruned meanwhile. The mirror drops older ones when a
    newer one is complete there.
    """

    def __init__(self, plan: RunPlan) -> None:
        """Connect to the mirror.

        Args:
            plan: The run, with `checkpoint_mirror`.

        Raises:
            CheckpointError: If a package is missing.
        """
        keys = plan.config.checkpoint
        assert keys.checkpoint_mirror is not None
        self._save = Path(keys.save or ".")
        self._keep = keys.keep_last_n_checkpoints
        self._mirror = Mirror(keys.checkpoint_mirror, part_bytes=keys.checkpoint_mirror_part_bytes)
        self._waiting: deque[Path] = deque(maxlen=1)
        self._wakes = threading.Event()
        self._ends = threading.Event()
        self._supersedes_all = requested_start(plan.config).replaces_save
        self._moved = time.monotonic()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="checkpoint-mirror")

    def on_start(self, state: TrainState) -> None:
        """Start the thread, with the newest local checkpoint if a killed run has not uploaded it."""
        newest = newest_checkpoint(self._save) if state.iteration > 0 else None
        if newest is not None:
            self._put(newest)
        self._thread.start()

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        """Queue a committed checkpoint."""
        self._put(report.path)

    def on_exit(self) -> None:
        """Wait for the last upload after training has ended, as long as it moves. Other ranks have ended already."""
        if not self._thread.is_alive():
            return
        self._moved = time.monotonic()
        self._ends.set()
        self._wakes.set()
        with busy_saving():
            while self._thread.is_alive():
                self._thread.join(_POLL_SECONDS)
                report_progress()
                if time.monotonic() - self._moved > _DEADLINE_SECONDS:
                    _log.warning("%s: the upload does not move; the local checkpoint stays", self._mirror.address)
                    return
        if self._keep is not None:  # one that stayed for its upload
            keep_last(self._save, self._keep)

    def _put(self, path: Path) -> None:
        self._waiting.append(path)
        self._wakes.set()

    def _note_progress(self) -> None:
        self._moved = time.monotonic()

    def _serve(self) -> None:
        with suppress(CheckpointError):  # said by the next upload if it lasts
            self._supersede_all()
        while True:
            self._wakes.wait()
            self._wakes.clear()
            while self._waiting:
                self._upload(self._waiting.popleft())
            if self._ends.is_set():
                return

    def _has(self, path: Path) -> bool:
        """Return whether the mirror holds this checkpoint already."""
        manifest = read_manifest(path)
        if manifest is None or manifest.iteration not in self._mirror.iterations():
            return False
        return self._mirror.manifest_text(manifest.iteration) == manifest.to_json().encode()

    def _has_earlier(self, path: Path) -> bool:
        """Return whether the mirror holds a complete checkpoint that is not later than this one."""
        newest = parse_step_directory(path.name)
        return newest is not None and any(step <= newest for step in self._mirror.iterations())

    def _supersede_all(self) -> None:
        """Let everything in the mirror no longer count if the run overwrites it. Raises CheckpointError."""
        if self._supersedes_all:
            self._note_superseded(self._mirror.supersede_after(-1), "this run overwrites them")
            self._supersedes_all = False

    def _supersede_later(self, path: Path) -> None:
        """Let what is later in the mirror than the run's newest checkpoint no longer count. Raises CheckpointError.

        It is of another run, or from before this one went back, and would be taken for the newest.
        """
        newest = parse_step_directory(path.name)
        if newest is None:
            return
        self._note_superseded(self._mirror.supersede_after(newest), "this run is before them")

    def _note_superseded(self, iterations: list[int], reason: str) -> None:
        if not iterations:
            return
        names = ", ".join(map(step_directory, iterations))
        _log.warning(
            "%s: %s no longer count, because %s: each %s can be renamed back",
            self._mirror.address,
            names,
            reason,
            SUPERSEDED_MANIFEST,
        )

    def _upload(self, path: Path) -> None:
        started = time.monotonic()
        if not path.is_dir():
            return  # pruned while it waited, so that a newer one comes next
        try:
            self._supersede_all()
            if self._has_earlier(path):
                self._supersede_later(path)
            if not self._has(path):
                with kept_from_deletion(path):
                    self._mirror.upload(path, self._note_progress)
                _log.info("%s is in %s after %.0f s", path.name, self._mirror.address, time.monotonic() - started)
            self._supersede_later(path)  # perhaps only now, so that the mirror never lacks a complete checkpoint
            if self._keep is not None:
                self._mirror.keep_last(self._keep)
        except (CheckpointError, OSError) as error:
            _log.warning("checkpoint_mirror: %s; training goes on, and %s stays", error, path)
