"""The run directory: what was asked for, what followed from it, how it was started; logs go below it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from neox.errors import LaunchError
from neox.files import write_text


def run_directory(log_dir: str | None, first_config: str | Path) -> Path:
    """`log_dir` where set, else `runs/` and the first configuration file's name."""
    return Path(log_dir).absolute() if log_dir else Path("runs", Path(first_config).stem).absolute()


def write_run_directory(
    directory: Path,
    *,
    plan: Mapping[str, Any],
    deepspeed: Mapping[str, Any],
    config: Mapping[str, Any],
    commands: Sequence[str],
) -> None:
    """Write plan.json, deepspeed.json, config.yml and command.txt (deepy's, then each host's), beside and renamed.

    Files of the last run in the same directory are replaced; logs are appended to.
    """
    try:
        (directory / "ranks").mkdir(parents=True, exist_ok=True)
        write_text(directory / "plan.json", json.dumps(plan, indent=2) + "\n")
        write_text(directory / "deepspeed.json", json.dumps(deepspeed, indent=2) + "\n")
        write_text(directory / "config.yml", yaml.safe_dump(dict(config), sort_keys=False))
        write_text(directory / "command.txt", "".join(f"{command}\n" for command in commands))
    except OSError as error:
        raise LaunchError(f"the run directory {directory} cannot be written: {error}; choose another log_dir") from None
