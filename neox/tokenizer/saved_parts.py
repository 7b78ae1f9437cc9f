"""Parts of a checkpoint next to its weights: dataclasses in JSON files, which may be missing."""

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


def write_part(path: Path, part: DataclassInstance | None) -> None:
    """Write a part, if there is one, to a checkpoint. Raises CheckpointError if it cannot be written."""
    if part is None:
        return
    with os_errors(CheckpointError, f"{path}: cannot be written"):
        path.write_text(json.dumps(asdict(part), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_part(path: Path, what: str, build: Callable[[Any], T]) -> T | None:
    """Return a part of a checkpoint; None if it has none.

    Args:
        path: The part's file.
        what: What it holds, for the message.
        build: Function from its JSON to the part. It raises ValueError or TypeError for JSON of another form.

    Raises:
        CheckpointError: If the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        return build(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read as {what}: {error}") from error
