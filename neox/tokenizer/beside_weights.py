"""Files of a checkpoint that stand beside its weights: dataclasses as JSON, which may be missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from neox.errors import CheckpointError, os_errors

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


def write_beside_weights(path: Path, value: DataclassInstance | None) -> None:
    """Write a value, if there is one, as a file of a checkpoint. Raises CheckpointError if it cannot be written."""
    if value is None:
        return
    with os_errors(CheckpointError, f"{path}: cannot be written"):
        path.write_text(json.dumps(asdict(value), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_beside_weights(path: Path, what: str, build: Callable[[Any], T]) -> T | None:
    """Return the value of a file of a checkpoint; None if there is no such file.

    Args:
        path: The file.
        what: What it holds, for the message.
        build: Function from its JSON to the value. It raises ValueError or TypeError for JSON of another form.

    Raises:
        CheckpointError: If the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        return build(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read as {what}: {error}") from error
