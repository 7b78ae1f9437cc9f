"""One run at a time in a directory: a kernel lock on a file that says who holds it, gone with its owner anyhow.

Two runs that write one `save` directory replace each other's checkpoints, and two that share a run directory mix their
logs and plans.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from neox.errors import LaunchError
from neox.files import lock_file
from neox.launch.spec import new_run_id
from neox.log import get_logger

_log = get_logger(__name__)
_NAME = ".run.lock"


def lock_directory(directory: Path, script: str, held: ExitStack, key: str = "") -> str | None:
    """Take the directory (made where missing) for as long as `held` is open; who has it already, None when we do now.

    Where the file system knows no locks (some network file systems) a warning says so. Raises LaunchError when the
    directory cannot be written; `key: ` names the setting.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / _NAME, "a+")  # noqa: SIM115 (open as long as the run)
    except OSError as error:
        raise LaunchError(f"{key}{directory} cannot be written: {error.strerror}; choose another directory") from None
    held.enter_context(file)
    try:
        locked = lock_file(file, wait=False)
    except BlockingIOError:
        return _owner(file)
    if not locked:
        _log.warning("%s: this file system has no locks: make sure that no other run uses the directory", directory)
        return None
    file.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(json.dumps({"script": script, "pid": os.getpid(), "host": socket.gethostname(), "since": since}))
    file.flush()
    return None


def hold(directories: Iterable[str], script: str, held: ExitStack) -> None:
    """Take directories, as the agent of a run does that no head process supervises. Raises LaunchError naming who has
    one of them."""
    for directory in dict.fromkeys(Path(name).resolve() for name in directories):
        owner = lock_directory(directory, script, held)
        if owner is not None:
            raise LaunchError(f"{directory} is in use by {owner}: end that run, or give this one other directories")


def _owner(file: IO[str]) -> str:
    """The holder in words; a holder that has not written its name yet is still a holder."""
    file.seek(0)
    try:
        about = json.loads(file.read())
        return f"{about['script']} (process {about['pid']} on {about['host']}, since {about['since']})"
    except (ValueError, KeyError, TypeError):
        return "another run"


def reserve(directory: Path, save: Path | None, script: str, held: ExitStack) -> Path:
    """Take the run directory and, for training, the `save` directory, as long as `held` is open; return the former.

    A script other than train.py (generate.py while its training goes on, say) takes a directory of its own below one
    that is in use. Raises LaunchError that names the holder.
    """
    training = Path(script).stem == "train"
    owner = lock_directory(directory, script, held, "log_dir: ")
    if owner is not None and training:
        raise LaunchError(f"the run directory {directory} is in use by {owner}: set another log_dir, or end that run")
    if owner is not None:
        aside = directory / f"{Path(script).stem}-{new_run_id()}"
        _log.warning("the run directory %s is in use by %s: this run's logs go to %s", directory, owner, aside.name)
        return aside
    if training and save is not None and save.resolve() != directory.resolve():
        owner = lock_directory(save, script, held, "save: ")
        if owner is not None:
            raise LaunchError(f"save: {save} is in use by {owner}: set another directory, or end that run")
    return directory
