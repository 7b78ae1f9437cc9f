"""Directory of a run: its plan, configuration and command, next to the logs of its ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import join
from typing import Any

import yaml

from neox.errors import LaunchError
from neox.files import write_text
from neox.plan import Device, RunPlan, plan_as_dict


def run_directory(log_dir: str | None, first_config: str | Path) -> Path:
    """Return the run directory: `log_dir` if it is given, else `runs/` and the name of the first configuration file."""
    if log_dir:
        return Path(log_dir).absolute()
    return Path("runs", Path(first_config).stem).absolute()


def write_run_directory(directory: Path, plan: RunPlan, device: Device, commands: Mapping[str, Any]) -> None:
    """Write plan.json, deepspeed.json, config.yml and command.txt in place of those of the last run.

    Args:
        directory: The run directory.
        plan: The plan.
        device: Device of a rank.
        commands: The command of this process as `launch`, and those of the hosts as `commands`.

    Raises:
        LaunchError: The directory cannot be written.
    """
    summary = plan_as_dict(plan, device)
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
