"""Directory of a run: its plan, configuration and command, next to the logs of its ranks."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import join
from typing import Any

import yaml

from neox.config import NeoXConfig
from neox.decisions.checkpoint import choose_checkpoint
from neox.errors import LaunchError, os_errors
from neox.files import write_text
from neox.metrics import METRICS_FILE
from neox.plan import Device, RunPlan, plan_as_dict
from neox.plan.run_identity import RUN_FILE, find_run, run_identity


def run_directory(log_dir: str | None, first_config: str | Path) -> Path:
    """Return the run directory: `log_dir` if it is given, else `runs/` and the name of the first configuration file."""
    if log_dir:
        return Path(log_dir).absolute()
    return Path("runs", Path(first_config).stem).absolute()


def write_run_directory(
    directory: Path, plan: RunPlan, device: Device, notes: Sequence[str], commands: Mapping[str, Any]
) -> None:
    """Write plan.json, deepspeed.json, config.yml and command.txt in place of those of the last run.

    Args:
        directory: The run directory.
        plan: The plan.
        device: Device of a rank.
        notes: Messages for people.
        commands: The command of this process as `launch`, and those of the hosts as `commands`.

    Raises:
        LaunchError: The directory cannot be written.
    """
    summary = plan_as_dict(plan, device, notes=notes, search=False)
    lines = [join([sys.executable, *sys.argv])]
    if commands["launch"]:
        lines.append(commands["launch"])
    for line in commands["commands"]:
        lines.append(f"# on {line['host']}\n{line['command']}")
    try:
        (directory / "ranks").mkdir(parents=True, exist_ok=True)
        write_text(directory / "plan.json", json.dumps(summary, indent=2) + "\n")
        write_text(directory / "deepspeed.json", json.dumps(summary["deepspeed"], indent=2) + "\n")
        write_text(directory / "config.yml", yaml.safe_dump(plan.config.to_flat(), sort_keys=False))
        write_text(directory / "command.txt", "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise LaunchError(f"the run directory {directory} cannot be written: {error}; choose another log_dir") from None


def claim_curves(directory: Path, config: NeoXConfig) -> str | None:
    """Record which training writes its curves into a run directory, and return a note if it was another one before.

    A training that begins at step 0 moves earlier curves aside. One that resumes appends to those that are there.

    Args:
        directory: The run directory, which is locked.
        config: Configuration of the training as it was given.

    Raises:
        LaunchError: The training would append to the curves of another one, or the directory cannot be written.
    """
    keys = config.checkpoint
    save = None if keys.save is None else str(Path(keys.save).resolve())
    ours = {"run_id": run_identity(config).run_id, "save": save}
    note = None
    if (directory / METRICS_FILE).exists() and (other := _other_run(directory, ours)) is not None:
        if choose_checkpoint(config).start.continues:
            raise LaunchError(
                f"log_dir: {directory} has the curves of {other}, and this run, which resumes from a checkpoint, would "
                f"continue them; set another log_dir, or remove {directory / RUN_FILE} if they are of the same run"
            )
        note = f"log_dir: {directory} has the curves of {other}; they are kept in files with a number"
    try:
        write_text(directory / RUN_FILE, json.dumps(ours, indent=2) + "\n")
    except OSError as error:
        raise LaunchError(f"log_dir: {directory} cannot be written: {error}; choose another log_dir") from None
    return note


def make_tensorboard_directory(config: NeoXConfig) -> None:
    """Make `tensorboard_dir` before ranks start. Raises LaunchError if it cannot be written."""
    if config.logging.tensorboard_dir is None:
        return
    directory = Path(config.logging.tensorboard_dir)
    with os_errors(LaunchError, f"tensorboard_dir: {directory} cannot be written, choose another directory"):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass


def _other_run(directory: Path, ours: Mapping[str, Any]) -> str | None:
    """Return the run that has claimed a directory, in words; None if it is ours, or none is recorded.

    A run is ours if it saves to the same directory, or if it is the same and its checkpoints are no longer where they
    were: they have been moved.
    """
    try:
        claim = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
        run_id, save = str(claim["run_id"]), claim["save"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if save is not None and save == ours["save"]:
        return None
    if run_id == ours["run_id"] and (save is None or find_run(Path(save)) is None):
        return None
    return "another run" if save is None else f"the run that saves to {save}"
