"""Export of checkpoints to Hugging Face's format while training goes on (`hf_export`).

    on_save, on_evaluation -> a checkpoint waits, kept from deletion
    on_step                -> the process of the one before has ended? start `tools/convert_to_hf.py` for the next
    on_exit                -> wait for the rest

One process at a time, without a GPU and with low priority. A failure is a warning: the checkpoint can still be exported
later.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from neox.checkpoint.save_directory.best import BEST, BEST_RECORD, read_best
from neox.checkpoint.save_directory.retention import keep_last
from neox.checkpoint.save_directory.staging import kept_from_deletion
from neox.checkpoint_files.finding import newest_checkpoint
from neox.checkpoint_files.names import parse_step_directory
from neox.engine import Feature, SaveReport, StepReport, TrainState
from neox.errors import ConfigError
from neox.files import read_json_object, write_text
from neox.launch import busy_saving, report_progress
from neox.launch.environment import child_environment
from neox.launch.hosts.vendors import VISIBLE_VARIABLES
from neox.launch.processes import parent_death_hook
from neox.log import get_logger
from neox.plan import RunPlan
from neox.plan.network.export_form import export_note
from neox.shipped_files import scripts_root

_log = get_logger(__name__)
_POLL_SECONDS = 0.2
_NO_GPU = {**dict.fromkeys(VISIBLE_VARIABLES, ""), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
_LAST_CHARACTERS = 400
"""Length of a failed export's output in the warning."""


def build(plan: RunPlan, rank: int) -> HfExport | None:
    """Return the exports, on rank 0; None without `hf_export`.

    Raises:
        ConfigError: No family of Hugging Face can express the network.
    """
    if rank != 0 or plan.config.checkpoint.hf_export is None:
        return None
    note = export_note(plan.config, plan.architecture)
    if note is not None:
        raise ConfigError(f"hf_export: {note}")
    return HfExport(plan)


@dataclass
class _Export:
    """A checkpoint that is exported, and is not deleted before that."""

    checkpoint: Path
    output: Path
    kept: ExitStack = field(default_factory=ExitStack)


class HfExport(Feature):
    """Queue of checkpoints, and the process that exports the first of them."""

    def __init__(self, plan: RunPlan) -> None:
        keys = plan.config.checkpoint
        self._save = Path(keys.save or ".")
        self._directory = Path(keys.export_directory or "-hf")
        self._hub = keys.hf_export_hub
        self._only_best = keys.hf_export == "best"
        self._keep_last = keys.keep_last_n_checkpoints
        self._waiting: deque[_Export] = deque()
        self._running: _Export | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._last_best: int | None = None

    def on_start(self, state: TrainState) -> None:
        """Export the newest checkpoint, or the best one, of a run that was killed before it could."""
        if state.iteration == 0 or not self._save.is_dir():
            return
        if self._only_best:
            self._take_best(is_new=False)
            return
        newest = newest_checkpoint(self._save)
        if newest is not None and not (self._directory / newest.name).exists():
            self._put(newest, self._directory / newest.name)

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        """Queue a committed checkpoint."""
        if self._only_best:
            self._take_best(is_new=True)
        else:
            self._put(report.path, self._directory / report.path.name)

    def on_evaluation(self, state: TrainState, name: str, scalars: Mapping[str, float | None]) -> None:
        """Queue a checkpoint that has become the best after its save."""
        if self._only_best:
            self._take_best(is_new=True)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Look whether the export has ended, and start the next one."""
        self._go_on()

    def on_exit(self) -> None:
        """Wait for the exports that are left. Other ranks have ended already."""
        with busy_saving():
            while self._running is not None or self._waiting:
                self._go_on()
                report_progress()
                time.sleep(_POLL_SECONDS)
        if self._keep_last is not None and self._save.is_dir():  # those that stayed for their exports
            keep_last(self._save, self._keep_last)

    def on_failure(self, state: TrainState) -> None:
        """Drop what waits; the process that runs ends with this one."""
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        for export in self._waiting:
            export.kept.close()
        self._waiting.clear()

    def _take_best(self, *, is_new: bool) -> None:
        """Queue the best checkpoint, unless it was queued before or, at a start, its export is there."""
        best = read_best(self._save)
        if best is None or best.iteration == self._last_best:
            return
        self._last_best = best.iteration
        if self._hub is None:  # a repository gets a revision of each
            self._drop_waiting()
        if is_new or self._exported_best() != best.checkpoint:
            self._put(self._save / best.checkpoint, self._directory / BEST)

    def _exported_best(self) -> str | None:
        """Return the name of the checkpoint whose export is `best`; None if there is none, or it is not known."""
        if not (self._directory / BEST).exists():
            return None
        return read_json_object(self._directory / BEST_RECORD).get("checkpoint")

    def _put(self, checkpoint: Path, output: Path) -> None:
        export = _Export(checkpoint, output)
        try:
            export.kept.enter_context(kept_from_deletion(checkpoint))
        except OSError as error:
            _log.warning("hf_export: %s cannot be kept for its export (%s)", checkpoint, error)
        self._waiting.append(export)
        self._go_on()

    def _go_on(self) -> None:
        """Report an export that has ended, and start the next one."""
        if self._process is not None and self._running is not None:
            status = self._process.poll()
            if status is None:
                return
            self._report_end(self._running, status)
            self._running.kept.close()
            self._running = None
            self._process = None
        if self._waiting:
            self._running = self._waiting.popleft()
            self._start(self._running)

    def _start(self, export: _Export) -> None:
        """Start the process that exports a checkpoint, in the main thread: the kernel ends it with this one."""
        command = ["nice", sys.executable, str(scripts_root() / "tools" / "convert_to_hf.py")]
        command += ["--input_dir", str(export.checkpoint), "--output_dir", str(export.output), "--overwrite"]
        if self._hub is not None:
            step = parse_step_directory(export.checkpoint.name)
            command += ["--upload", self._hub, "--revision", f"step{step}"]
        self._started = time.monotonic()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with self._log_file(export).open("wb") as output:
                self._process = subprocess.Popen(
                    command,
                    env={**child_environment(), **_NO_GPU},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=parent_death_hook(),
                )
        except OSError as error:
            _log.warning("hf_export: %s is not exported: %s; training goes on", export.checkpoint, error)
            export.kept.close()
            self._running = None

    def _report_end(self, export: _Export, status: int) -> None:
        file = self._log_file(export)
        text = file.read_text(encoding="utf-8", errors="replace").strip()
        if status == 0:
            file.unlink(missing_ok=True)
            if export.output.name == BEST:
                with suppress(OSError):  # without it a restart exports the checkpoint again
                    write_text(self._directory / BEST_RECORD, json.dumps({"checkpoint": export.checkpoint.name}) + "\n")
            check = [line for line in text.splitlines() if "verified" in line]
            seconds = time.monotonic() - self._started
            _log.info(
                "%s is exported to %s after %.0f s; %s", export.checkpoint, export.output, seconds, "".join(check[-1:])
            )
            return
        _log.warning(
            "hf_export: %s could not be exported (status %d): ...%s; training goes on, and %s has its output",
            export.checkpoint,
            status,
            text[-_LAST_CHARACTERS:],
            file,
        )

    def _log_file(self, export: _Export) -> Path:
        return export.output.with_name(f"{export.output.name}.export.log")
