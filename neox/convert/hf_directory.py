"""A Hugging Face directory: its files and its atomic creation."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from typing import Any

from neox.errors import ConfigError, ConversionError, os_errors, refusals
from neox.files import atomic_directory, check_writable, placeholder_at
from neox.log import get_logger

CONFIG = "config.json"
SAFETENSORS = "model.safetensors"
BIN = "pytorch_model.bin"
ADAPTER_CONFIG = "adapter_config.json"
_EXPORTED = (
    "*.json",
    "*.safetensors",
    "pytorch_model*.bin",
    "*.jinja",
    "README.md",
    "merges.txt",
    "vocab.txt",
    "*.model",
)
"""Names of the files of exports, of this project and of others."""
_MOST_NAMES = 4
INDEX_ENDING = ".index.json"
"""End of the name of an index, which says which of several files holds each tensor."""


_log = get_logger(__name__)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError if there is no such file, and ConversionError if it holds no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; give the directory of a Hugging Face model") from error
    except (OSError, ValueError) as error:
        reason = placeholder_at(path) or f"cannot be read as JSON: {error}"
        raise ConversionError(f"{path}: {reason}") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an indented JSON object. Raises ConversionError if the disk refuses."""
    with os_errors(ConversionError, f"{path}: cannot be written"):
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def check_new_directory(output: Path, *, overwrite: bool) -> None:
    """Check that a directory can be written, before work is done for it.

    Args:
        output: Directory to create.
        overwrite: Whether a directory that is not empty is replaced.

    Raises:
        ConfigError: If it is not empty and must not be replaced.
        ConversionError: If it cannot be created, with the exit status of a configuration error.
    """
    is_used = output.exists() and (not output.is_dir() or any(output.iterdir()))
    if is_used and not overwrite:
        raise ConfigError(f"{output} exists and is not empty; choose another directory, or pass --overwrite")
    with refusals(), os_errors(ConversionError, f"{output}: cannot be written"):
        check_writable(output)


@contextmanager
def new_directory(output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory that becomes `output` when the block has ended without an exception.

    An earlier export is removed then. A directory that holds anything else, such as checkpoints, gets another name.

    Args:
        output: Directory to create.
        overwrite: Whether a directory that is not empty is replaced.

    Raises:
        ConfigError: If `output` is not empty and must not be replaced.
        ConversionError: If it cannot be created.
    """
    check_new_directory(output, overwrite=overwrite)
    others = _files_of_others(output)
    kept = _free_name(output.resolve()) if others else None
    error_of_block: OSError | None = None
    try:
        with atomic_directory(output, kept) as partial:
            try:
                yield partial
            except OSError as error:
                error_of_block = error
                raise
    except OSError as error:
        if error is error_of_block:
            raise
        raise ConversionError(f"{output}: cannot be written: {error.strerror or error} ({error.filename})") from error
    if kept is not None:
        listed = ", ".join(others[:_MOST_NAMES]) + (", ..." if len(others) > _MOST_NAMES else "")
        _log.warning("%s held more than an export (%s): all that was there is now in %s", output, listed, kept)


def _files_of_others(output: Path) -> list[str]:
    """Return the names in a directory that no export writes; all of them if it is no export."""
    if not output.is_dir():
        return [output.name] if output.exists() else []
    names = sorted(path.name for path in output.iterdir())
    if not any(name in names for name in (CONFIG, ADAPTER_CONFIG)):
        return names
    return [name for name in names if (output / name).is_dir() or not any(fnmatch(name, form) for form in _EXPORTED)]


def _free_name(path: Path) -> Path:
    """Return the first of `PATH.old`, `PATH.old.1`, ... that does not exist."""
    for number in count():
        name = f"{path.name}.old.{number}" if number else f"{path.name}.old"
        if not os.path.lexists(path.with_name(name)):
            return path.with_name(name)
    raise AssertionError("unreachable")
