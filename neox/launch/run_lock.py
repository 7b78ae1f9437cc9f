"""Locks that keep other runs out of a run's directories: an advisory lock on a file that names its holder.

Two runs with one `save` directory would replace each other's checkpoints. Two runs with one run directory would mix
their logs and plans. The kernel releases the lock when its holder ends.
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

from neox.errors import LaunchError, refusals
from neox.files import lock_file
from neox.launch.processes import process_start
from neox.launch.spec import new_run_id
from neox.log import get_logger

_log = get_logger(__name__)
LOCK_FILE = ".run.lock"
"""Name of the file in a locked directory."""


def is_training(script: str) -> bool:
    """Return whether a script, given by its name or path, is the one that trains."""
    return Path(script).stem == "train"


def lock_directory(directory: Path, script: str, held: ExitStack, key: str = "") -> str | None:
    """Create a directory if it is missing, and lock it.

    On a file system without locks (some network file systems) a warning is logged.

    Args:
        directory: Path of the directory.
        script: Name of the script that the run starts, for messages of other runs.
        held: Stack that holds the lock until it is closed.
        key: Key of the configuration that names the directory, as `log_dir: `, for messages.

    Returns:
        None if this process holds the lock now, else a description of the process that holds it.

    Raises:
        LaunchError: The directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / LOCK_FILE, "a+")  # noqa: SIM115 (open as long as the run)
    except OSError as error:
        message = f"{key}{directory} cannot be written: {error.strerror}; choose another directory"
        with refusals():
            raise LaunchError(message) from None
    held.enter_context(file)
    try:
        locked = lock_file(file, wait=False)
    except BlockingIOError:
        return _owner(file)
    if not locked:
        _log.warning("%s: this file system has no locks: make sure that no other run uses the directory", directory)
        return None
    file.truncate(0)
    holder = {
        "script": script,
        "pid": os.getpid(),
        "pid_since": process_start(os.getpid()),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    file.write(json.dumps(holder))
    file.flush()
    return None


def training_in(directory: Path) -> str | None:
    """Return a description of the training that has locked a directory at this moment; None if there is none."""
    try:
        with open(directory / LOCK_FILE, "r+") as file:
            try:
                lock_file(file, wait=False)
            except BlockingIOError:
                owner = _owner(file)
                return owner if is_training(owner.split()[0]) else None
    except OSError:
        return None  # no lock, or one that cannot be opened
    return None


def lock_directories(directories: Iterable[str], script: str, held: ExitStack) -> None:
    """Lock directories for a run that no launcher process supervises. Its agent calls this.

    Args:
        directories: Paths of the directories.
        script: Name of the script that the run starts.
        held: Stack that holds the locks until it is closed.

    Raises:
        LaunchError: Another run holds one of them, or it cannot be written.
    """
    for directory in dict.fromkeys(Path(name).resolve() for name in directories):
        owner = lock_directory(directory, script, held)
        if owner is not None:
            raise LaunchError(f"{directory} is in use by {owner}: end that run, or give this one other directories")


def _owner(file: IO[str]) -> str:
    """Describe the holder of a lock. It may not have written its name yet."""
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return f"{holder['script']} (process {holder['pid']} on {holder['host']}, since {holder['since']})"
    except (ValueError, KeyError, TypeError):
        return "another run"


def reserve(directory: Path, save: Path | None, script: str, held: ExitStack) -> Path:
    """Lock the run directory and, for training, the `save` directory.

    Args:
        directory: Path of the run directory.
        save: Directory for the checkpoints of a training.
        script: Name of the script that the run starts.
        held: Stack that holds the locks until it is closed.

    Returns:
        The run directory. If it is in use, and the script is not train.py, it is a new directory below the run
        directory: generate.py may run while a training does, for example.

    Raises:
        LaunchError: Another run holds one of them, or it cannot be written.
    """
    training = is_training(script)
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
