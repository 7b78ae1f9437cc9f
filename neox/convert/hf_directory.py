"""A Hugging Face directory: its files and its atomic creation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neox.errors import ConfigError, ConversionError, os_errors
from neox.files import atomic_directory

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SAFETENSORS = "model.safetensors"
BIN = "pytorch_model.bin"
INDEX_ENDING = ".index.json"
"""End of the name of an index, which says which of several files holds each tensor."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError if there is no such file, and ConversionError if it holds no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; give the directory of a Hugging Face model") from error
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an indented JSON object. Raises ConversionError if the disk refuses."""
    with os_errors(ConversionError, f"{path}: cannot be written"):
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def refuse_used_directory(output: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if an output directory is not empty and may not be overwritten."""
    is_used = output.exists() and (not output.is_dir() or any(output.iterdir()))
    if is_used and not overwrite:
        raise ConfigError(f"{output} exists and is not empty; choose another directory, or pass --overwrite")


@contextmanager
def new_directory(output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory that becomes `output` when the block has ended without an exception.

    Args:
        output: Directory to create.
        overwrite: Whether a directory that is not empty is replaced.

    Raises:
        ConfigError: If `output` is not empty and must not be replaced.
        ConversionError: If it cannot be created.
    """
    refuse_used_directory(output, overwrite=overwrite)
    error_of_block: OSError | None = None
    try:
        with atomic_directory(output) as partial:
            try:
                yield partial
            except OSError as error:
                error_of_block = error
                raise
    except OSError as error:
        if error is error_of_block:
            raise
        raise ConversionError(f"{output}: cannot be written: {error.strerror or error} ({error.filename})") from error
