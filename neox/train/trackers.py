"""Experiment trackers: TensorBoard, Weights & Biases, and a metrics file with a picture of the loss.

TensorBoard and wandb are off unless they are configured; configured and not installed, they are an error.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import textwrap
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from neox.engine import SaveReport
from neox.errors import ConfigError, TrainingError, install_command
from neox.log import get_logger
from neox.metrics import METRICS_FILE, PICTURE, STABILITY_PICTURE, draw, draw_stability
from neox.objectives import build_objective
from neox.plan import RunPlan, plan_as_dict
from neox.train.callbacks import Callback, StepReport, TrainState

_log = get_logger(__name__)
WANDB_RUN_ID_FILE = "wandb_run_id"
"""File in the run directory with the id of the wandb run that a resumed training continues."""

_SHOWN = (
    "grid",
    "batch",
    "precision",
    "vocab_size",
    "padded_vocab_size",
    "parameters",
    "memory",
    "figures",
    "notes",
    "deepspeed",
)
"""Parts of the plan that trackers show."""


class Tracker(Callback):
    """Callback that writes the scalars of steps, evaluations and checkpoints; subclasses implement `write`.

    A row that cannot be written is lost, with one warning; this never ends the training.
    """

    _lost_rows = 0

    def write(self, iteration: int, kind: str, scalars: Mapping[str, float]) -> None:
        """Write scalars by name, at an iteration; `kind` is `step`, `save` or the name of an evaluation."""
        raise NotImplementedError

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Write the step's scalars."""
        self._write_or_lose(state.iteration, "step", report.scalars())

    def on_evaluation(self, state: TrainState, name: str, scalars: Mapping[str, float]) -> None:
        """Write the evaluation's scalars."""
        self._write_or_lose(state.iteration, name, scalars)

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        """Write the save's durations."""
        self._write_or_lose(state.iteration, "save", report.scalars())

    def _write_or_lose(self, iteration: int, kind: str, scalars: Mapping[str, float]) -> None:
        name = type(self).__name__
        try:
            self.write(iteration, kind, scalars)
        except Exception as error:  # the tracker's package may raise anything
            if not self._lost_rows:
                _log.warning("%s cannot write (%s: %s); training continues", name, type(error).__name__, error)
            self._lost_rows += 1
            return
        if self._lost_rows:
            _log.warning("%s can write again; %d rows were lost", name, self._lost_rows)
            self._lost_rows = 0


def run_settings(plan: RunPlan) -> dict[str, Any]:
    """Return what trackers show of a run: its configuration as flat keys, and its plan under `plan`."""
    report = plan_as_dict(plan)
    derived = {"architecture": plan.architecture.to_dict()}
    for name in _SHOWN:
        derived[name] = report[name]
    return {**plan.config.to_flat(), "plan": derived}


class TensorBoard(Tracker):
    """TensorBoard event files in a directory.

    Args:
        directory: Directory of the files (`tensorboard_dir`).
        plan: Plan that is shown as text and as hyperparameters; None for scores of a checkpoint.
        purge: Whether `on_start` makes TensorBoard drop earlier points: those that a resume trains again, or, from
            iteration 0, all of an earlier run.

    Raises:
        ConfigError: If tensorboard is not installed.
    """

    def __init__(self, directory: str, plan: RunPlan | None = None, *, purge: bool = True) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"tensorboard_dir is set, but tensorboard is not installed ({error}): "
                f"{install_command('requirements-tensorboard.txt')}, or unset tensorboard_dir"
            ) from error
        self.directory = directory
        self.plan = plan
        self.purge = purge
        self._make_writer: Any = SummaryWriter
        self._writer: Any = None

    def on_start(self, state: TrainState) -> None:
        """Open an event file.

        Raises:
            TrainingError: If the directory cannot be written.
        """
        purge_step = None
        if self.purge:
            purge_step = state.iteration + 1 if state.iteration else 0
        try:
            self._writer = self._make_writer(self.directory, purge_step=purge_step)
        except OSError as error:
            raise TrainingError(f"tensorboard_dir: {self.directory} cannot be written: {error.strerror}") from error
        if self.plan is not None:
            self._describe(self.plan, state.iteration)

    def _describe(self, plan: RunPlan, iteration: int) -> None:
        """Add the run's settings as text, and those that are numbers, words or truth values as hyperparameters."""
        from torch.utils.tensorboard.summary import hparams

        settings = run_settings(plan)
        derived = settings.pop("plan")
        for name, values in (("config", settings), ("plan", derived)):
            text = json.dumps(values, indent=2, default=str)
            self._writer.add_text(name, textwrap.indent(text, "    ") + "\n", iteration)
        flat = {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str)}
        loss = build_objective(plan).names[0]
        for summary in hparams(flat, {f"train/{loss}": 0.0, f"validation/{loss}": 0.0}):
            self._writer.file_writer.add_summary(summary)

    def on_end(self, state: TrainState) -> None:
        """Close the event file."""
        self._writer.close()

    def on_failure(self, state: TrainState) -> None:
        """Close the event file if there is one."""
        if self._writer is not None:
            self._writer.close()

    def write(self, iteration: int, kind: str, scalars: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)


class WandB(Tracker):
    """Weights & Biases run (`WANDB_MODE=offline` keeps it on disk).

    The run's id is kept in `log_dir` (else `save`), so that a resumed training continues the same run. Offline, each
    start has an id of its own, because a sync of two starts with one id keeps only the later one's rows. They are in
    one group: `wandb_group`, or the id of the first start. Charts count in `iteration`: wandb's own step never goes
    back, which a resume from an earlier checkpoint does.

    Raises:
        ConfigError: If wandb is not installed.
    """

    def __init__(self, plan: RunPlan) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"use_wandb is true, but wandb is not installed ({error}): "
                f"{install_command('requirements-wandb.txt')}, or set use_wandb to false"
            ) from error
        self._wandb: Any = wandb
        self._plan = plan
        self._run: Any = None

    def on_start(self, state: TrainState) -> None:
        """Begin a run, or continue the one of the training that is resumed.

        Raises:
            TrainingError: If the run's id cannot be kept, or wandb cannot start.
        """
        keys = self._plan.config.logging
        wandb = self._wandb
        directory = tracker_directory(self._plan)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            offline = wandb.setup().settings.mode in ("offline", "dryrun")
            file = directory / WANDB_RUN_ID_FILE
            run_id, group = self._id_and_group(file, resumed=state.iteration > 0, offline=offline)
        except OSError as error:
            raise TrainingError(f"{directory}: the id of wandb's run cannot be kept: {error.strerror}") from error
        try:
            self._run = wandb.init(
                project=keys.wandb_project,
                group=group,
                name=keys.wandb_run_name,
                entity=keys.wandb_team,
                config=run_settings(self._plan),
                dir=directory,
                id=run_id,
                resume="allow",
                settings=wandb.Settings(base_url=keys.wandb_host),
            )
        except wandb.errors.Error as error:
            raise TrainingError(
                f"wandb could not start ({error}); log in, set WANDB_MODE=offline, or unset use_wandb"
            ) from error
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def _id_and_group(self, file: Path, *, resumed: bool, offline: bool) -> tuple[str, str | None]:
        """Return the id of this start's run, and its group.

        Args:
            file: File with the id of the last start; after an offline one also the word `offline` and the group.
            resumed: Whether the training is resumed.
            offline: Whether this start only writes to disk.
        """
        group = self._plan.config.logging.wandb_group
        last = file.read_text().split() if resumed and file.is_file() else []
        if len(last) == 1 and not offline:
            return last[0], group
        run_id = secrets.token_hex(4)
        together = group or (last or [run_id])[-1]
        if last:
            _log.info("wandb: this start is the run %s, in the group %s with those before it", run_id, together)
        file.write_text(f"{run_id} offline {together}\n" if offline else f"{run_id}\n")
        if offline or last:
            return run_id, together
        return run_id, group

    def write(self, iteration: int, kind: str, scalars: Mapping[str, float]) -> None:
        """Log one row."""
        self._run.log({"iteration": iteration, **scalars})

    def on_end(self, state: TrainState) -> None:
        """Finish the run, and wandb's own process."""
        self._run.finish()
        self._wandb.teardown()

    def on_failure(self, state: TrainState) -> None:
        """Finish the run as failed, if it has begun."""
        if self._run is not None:
            self._run.finish(exit_code=1)
            self._wandb.teardown()


def tracker_directory(plan: RunPlan) -> Path:
    """Return the directory in which trackers keep files for a resumed training."""
    return Path(plan.config.logging.log_dir or plan.config.checkpoint.save or os.curdir)


def kept_run_id(file: Path, *, resumed: bool) -> str:
    """Return the id that `file` holds if the training is resumed; else write a new one to it and return that."""
    if resumed and file.is_file():
        kept = file.read_text().strip()
        if kept:
            return kept
    run_id = secrets.token_hex(4)
    file.write_text(run_id + "\n")
    return run_id


def report_scores(plan: RunPlan, scores: Mapping[str, float], iteration: int, others: Sequence[Tracker] = ()) -> None:
    """Add the scores of a checkpoint to the trackers of the run that wrote it, if they are configured.

    Args:
        plan: Plan whose configuration names the trackers.
        scores: Scores by name.
        iteration: Iteration of the checkpoint.
        others: Further trackers of the run.
    """
    keys = plan.config.logging
    state = TrainState(iteration=iteration)
    trackers: list[Tracker] = [*others]
    if keys.tensorboard_dir:
        trackers.append(TensorBoard(keys.tensorboard_dir, purge=False))  # the curves beyond the checkpoint stay
    if keys.use_wandb:
        trackers.append(WandB(plan))
    for tracker in trackers:
        tracker.on_start(state)
        tracker.on_evaluation(state, "tasks", scores)
        tracker.on_end(state)


class MetricsFile(Tracker):
    """Metrics as `log_dir/metrics.jsonl`, one JSON object a line, and the trained loss as `log_dir/loss.png`.

    A row's `kind` says what was measured (see `neox.metrics.read_metrics`); each iteration has one row of kind `step`.

    The picture is drawn at checkpoints and at the end, and with `log_stability_every` also `log_dir/stability.png`. A
    run that starts at iteration 0 begins new files. Those of an earlier run are kept next to them as `metrics-1.jsonl`
    and `loss-1.png`, and so on. Values are unrounded. One that is not finite is written as the text "nan", "inf" or
    "-inf", so that lines stay JSON.

    Args:
        log_dir: Directory of the files, which is created if it does not exist.

    Raises:
        TrainingError: If the file cannot be written.
    """

    def __init__(self, log_dir: str | Path) -> None:
        self.path = Path(log_dir) / METRICS_FILE
        self.picture = Path(log_dir) / PICTURE
        self.stability_picture = Path(log_dir) / STABILITY_PICTURE
        self._preloading = False
        self._observes_stability = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        except OSError as error:
            raise TrainingError(f"log_dir: {self.path} cannot be written: {error.strerror}") from error

    def on_start(self, state: TrainState) -> None:
        """Continue the file of the training that is resumed, or begin a new one."""
        if state.iteration > 0:
            cut_partial_line(self.path)
        elif self.path.stat().st_size > 0:
            self._stream.close()
            _keep_earlier_run(self.path, self.picture, self.stability_picture)
            self._stream = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Write the step's scalars."""
        super().on_step(state, report)
        self._observes_stability |= bool(report.result.stability)
        if not self._preloading:  # a second of imports: neither before the first step nor after the last one
            self._preloading = True
            threading.Thread(target=import_module, args=("matplotlib.figure",), daemon=True).start()

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        """Write the save's durations, and draw."""
        super().on_save(state, report)
        self._draw()

    def on_end(self, state: TrainState) -> None:
        """Close the file, and draw."""
        self._stream.close()
        self._draw()

    on_failure = on_end

    def _draw(self) -> None:
        draw({"": self.path}, self.picture)
        if self._observes_stability:
            draw_stability(self.path, self.stability_picture)

    def write(self, iteration: int, kind: str, scalars: Mapping[str, float]) -> None:
        """Append one line."""
        row: dict[str, Any] = {"iteration": iteration, "kind": kind}
        for name, value in scalars.items():
            row[name] = value if math.isfinite(value) else str(value)
        self._stream.write(json.dumps(row) + "\n")
        self._stream.flush()


def cut_partial_line(path: Path) -> None:
    """Cut off the part of a line that a killed run wrote last."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def _keep_earlier_run(*files: Path) -> None:
    """Rename files, those that exist, with the first number that is free."""
    for number in itertools.count(1):
        kept = [file.with_stem(f"{file.stem}-{number}") for file in files]
        if not any(file.exists() for file in kept):
            break
    for file, name in zip(files, kept, strict=True):
        if file.exists():
            file.rename(name)
